"""Tests of encoder-decoders from configuration to files: training, prediction, evaluation and simulation."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from partita import Model
from partita.data import DataLoader
from partita.distributed.thread_group import ThreadGroup
from partita_schema.errors import ConfigError, DataError, ModelError

from ..encoder_decoders import SIZES, save_encoder_decoder
from ..json_lines import read_json_lines, write_json_lines
from .conftest import Command, TrainKilled

COLOURS = ("red", "blue", "green")


def make_rows(count: int) -> list[dict[str, str]]:
    """Return sentences of different lengths, each with the colour in it."""
    return [
        {"text": " ".join(["I see"] * (number % 4) + [f"the {colour} ball"]), "say": f"{colour} ball"}
        for number, colour in zip(range(count), COLOURS * count, strict=False)
    ]


ROWS = make_rows(48)


REST = ("mt5", "bart", "pegasus")
ALL = {"type": "random", "probabilities": [1.0, 0.0, 0.0]}


def source_of(path: Path, *, streaming: bool) -> dict[str, Any]:
    return {"type": "json", "path": str(path), "streaming": streaming}


def make_config(base: Path, **sections: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "base_model": str(base),
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "say", "type": "text"}],
        "generation": {"max_new_tokens": 12, "defaults": "none"},
        "data": {"batching": {"type": "bucket"}},
        "trainer": {
            "type": "finetune",
            "max_steps": 4,
            "batch_size": 8,
            "learning_rate": 0.003,
            "steps_per_checkpoint": 2,
            "skip_all_evaluation": True,
        },
    }
    for name, section in sections.items():
        merged = name in config and "type" not in section and isinstance(section, dict)
        config[name] = config[name] | section if merged else section
    return config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: the folder of a saved model of an architecture, with dropout."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            path = tmp_path_factory.mktemp(architecture)
            made[architecture] = save_encoder_decoder(path, architecture, dropout=0.1, sharp=2.0)
        return made[architecture]

    return folder


def library_batch(tokenizer: Any, rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """Return rows as the examples and scripts of transformers tokenize and collate them."""
    from transformers import DataCollatorForSeq2Seq

    examples = [dict(tokenizer(row["text"], text_target=row["say"])) for row in rows]
    return dict(DataCollatorForSeq2Seq(tokenizer)(examples))


@pytest.mark.parametrize("architecture", SIZES)
def test_batches_of_the_public_loader_are_those_of_the_collator_of_transformers(
    folders: Callable[[str], Path], architecture: str
) -> None:
    config = make_config(folders(architecture), data={"split": ALL, "batching": {"type": "fixed", "shuffle": False}})
    loader = DataLoader(config, ROWS[:16])
    for number, batch in enumerate(loader):
        inputs, wanted = batch.model_inputs(), library_batch(loader.tokenizer, ROWS[8 * number : 8 * number + 8])
        mask = wanted["attention_mask"]
        assert torch.equal(inputs["attention_mask"], mask)
        assert torch.equal(inputs["input_ids"] * mask, wanted["input_ids"] * mask)
        assert torch.equal(inputs["labels"], wanted["labels"])
        assert batch.tokens == int(mask.sum() + (wanted["labels"] != -100).sum())


@pytest.mark.long
@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.filterwarnings("ignore")
def test_the_first_loss_and_its_gradients_equal_those_of_seq2seq_trainer(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from partita.lm.load_model import load_model
    from partita.tokenizers.load import read_tokenizer
    from partita_schema.config import Config

    base = save_encoder_decoder(tmp_path / "base", architecture)
    config = make_config(base, data={"split": ALL, "batching": {"type": "fixed", "shuffle": False}})
    loader = DataLoader(config, ROWS[:8])
    (batch,) = loader
    lm = load_model(Config.model_validate(config), folder=tmp_path, tokenizer=read_tokenizer(str(base)), trainable=True)
    loss = lm.loss(lm.module, batch) / batch.loss_tokens
    loss.backward()

    model = AutoModelForSeq2SeqLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    trainer = Seq2SeqTrainer(model, Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    model.eval()
    theirs = trainer.compute_loss(model, library_batch(tokenizer, ROWS[:8]))
    theirs.backward()
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=0)
    wanted = dict(model.named_parameters())
    for name, parameter in lm.module.named_parameters():
        if parameter.grad is not None:
            difference = (parameter.grad - wanted[name].grad).norm()
            assert difference <= 1e-5 * wanted[name].grad.norm() + 1e-7, name


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["t5", *REST])
def test_a_run_that_is_killed_continues_bit_for_bit(
    folders: Callable[[str], Path], architecture: str, tmp_path: Path, train_killed: TrainKilled
) -> None:
    from safetensors.torch import load_file

    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    config = make_config(folders(architecture), data={"source": str(tmp_path / "rows.jsonl")})
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    Model(config, quiet=True).train(run=straight)
    train_killed(Model(config, quiet=True), broken, after=3)
    Model(config, quiet=True).train(run=broken)
    one, other = read_json_lines(straight / "log.jsonl"), read_json_lines(broken / "log.jsonl")
    assert [(line["step"], line["loss"]) for line in other] == [(line["step"], line["loss"]) for line in one]
    assert len({line["loss"] for line in one}) == 4
    weights = [load_file(run / "model" / "model.safetensors") for run in (straight, broken)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "streaming"])
def test_two_ranks_read_the_rows_and_have_the_loss_of_one(
    folders: Callable[[str], Path], streaming: bool, tmp_path: Path
) -> None:
    from partita.lm.load_model import load_model
    from partita.tokenizers.load import read_tokenizer
    from partita_schema.config import Config

    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    source = source_of(tmp_path / "rows.jsonl", streaming=streaming)
    data = {"source": source, "batching": {"type": "fixed"}} | ({} if streaming else {"split": ALL})
    base = folders("t5")
    config = make_config(base, data=data)
    lm = load_model(Config.model_validate(config), folder=tmp_path, tokenizer=read_tokenizer(str(base)), trainable=True)
    with ThreadPoolExecutor(2) as pool:
        read = list(pool.map(lambda group: list(DataLoader(config, process_group=group)), ThreadGroup.of(2)))
    alone = list(DataLoader(config))
    with torch.no_grad():
        sums = [sum(float(lm.loss(lm.module, batch)) for batch in batches) for batches in (*read, alone)]
    assert sorted(key for batches in read for batch in batches for key in batch.keys) == sorted(
        key for batch in alone for key in batch.keys
    )
    assert all(batch.two_sided for batch in (*alone, *read[0], *read[1]))
    assert sums[0] > 0
    assert sums[0] + sums[1] == pytest.approx(sums[2], rel=1e-5)


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "streaming"])
def test_a_token_budget_counts_both_sides(folders: Callable[[str], Path], streaming: bool, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    batching = {"type": "token_budget", "max_tokens": 60}
    data = {"source": source_of(tmp_path / "rows.jsonl", streaming=streaming), "batching": batching}
    data |= {} if streaming else {"split": ALL}
    config = make_config(folders("t5"), data=data)
    del config["trainer"]["batch_size"]
    batches = list(DataLoader(config))
    sizes = set()
    for batch in batches:
        inputs = batch.model_inputs()
        assert batch.rows * int(batch.lengths_B.max()) <= 60
        assert inputs["input_ids"].numel() + inputs["labels"].numel() <= 60
        sizes.add(batch.rows)
    assert sum(batch.rows for batch in batches) == 48
    assert len(sizes) > 1


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_an_adapter_of_a_module_that_is_not_used_names_those_with_its_weight(
    folders: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    adapter = {"type": "lora", "r": 2, "target_modules": ["shared"]}
    with pytest.raises(ModelError) as error:
        Model(make_config(folders(architecture), adapter=adapter), quiet=True).train(ROWS, run=tmp_path / "run")
    model = "model." if architecture == "bart" else ""
    assert str(error.value) == (
        f"adapter.target_modules: {model}shared is not used by this model; its weight is that of "
        f"{model}encoder.embed_tokens, {model}decoder.embed_tokens, lm_head: write embed_tokens instead"
    )


@pytest.mark.long
def test_a_trained_model_predicts_what_it_evaluates_and_what_transformers_generates(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    trainer = {"max_steps": 60, "learning_rate": 0.01}
    model = Model(make_config(folders("bart"), trainer=trainer), quiet=True)
    model.train(ROWS, run=tmp_path / "run")
    asked = ROWS[:12]
    answers = [answer["say"] for answer in model.predict([{"text": row["text"]} for row in asked])]
    scores = model.evaluate(asked)
    right = sum(answer == row["say"] for answer, row in zip(answers, asked, strict=True))
    assert scores["say"]["exact_match"] == pytest.approx(right / 12)
    assert scores["say"]["rouge_l"] > 0.5
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    for row, answer in zip(asked, answers, strict=True):
        ids = plain.generate(
            **tokenizer(row["text"], return_tensors="pt"), max_new_tokens=12, num_beams=1, forced_eos_token_id=None
        )
        assert tokenizer.decode(ids[0], skip_special_tokens=True).strip() == answer
    again = Model.load(tmp_path / "run", quiet=True)
    assert [answer["say"] for answer in again.predict([{"text": row["text"]} for row in asked])] == answers


@pytest.mark.parametrize("scoring", [True, False])
def test_labels_are_scored_or_generated_without_training(folders: Callable[[str], Path], scoring: bool) -> None:
    decoder = {"labels": ["red ball", "blue ball", "green"]} | ({"scoring": True} if scoring else {})
    outputs = [{"name": "say", "type": "category", "decoder": decoder}]
    config = make_config(folders("t5"), output_features=outputs, trainer={"type": "none", "batch_size": 4})
    config["generation"] = {}
    model = Model(config, quiet=True)
    answers = list(model.predict([{"text": row["text"]} for row in ROWS[:10]]))
    assert len(answers) == 10
    if scoring:
        assert {answer["say"] for answer in answers} <= {"red ball", "blue ball", "green"}
        assert model.evaluate([*ROWS[:2], {"text": "one", "say": "green"}])["say"]["invalid"] == 0


def test_a_constrained_answer_is_refused_with_the_reason(folders: Callable[[str], Path]) -> None:
    decoder = {"json_schema": {"type": "object"}, "constrain": True}
    outputs = [{"name": "say", "type": "json", "decoder": decoder}]
    config = make_config(folders("t5"), output_features=outputs, trainer={"type": "none"})
    with pytest.raises(ConfigError) as refused:
        Model(config, quiet=True).predict([{"text": "one"}])
    assert str(refused.value) == (
        "output_features[0].decoder.constrain: answers are constrained by a decoder alone, and this model also has an "
        "encoder; remove constrain"
    )


def test_answers_end_at_the_decoder_and_prompts_at_the_encoder(tmp_path: Path) -> None:
    base = save_encoder_decoder(tmp_path / "base", "bart", context=16)
    config = make_config(base, generation={"max_new_tokens": 50}, trainer={"type": "none", "batch_size": 2})
    rows = [{"text": text} for text in ("a" * 14, "a" * 15, "b")]
    found = list(Model(config, quiet=True).predict(rows))
    assert [answer["status"] for answer in found] == ["ok", "error", "ok"]
    assert "the prompt is longer than the 16 tokens that the encoder reads" in found[1]["error"]
    assert all(answer["tokens"] <= 16 for answer in (found[0], found[2]))


def test_batch_size_auto_probes_both_sides(folders: Callable[[str], Path], tmp_path: Path) -> None:
    trainer = {"batch_size": "auto", "max_steps": 2, "skip_all_evaluation": False}
    Model(make_config(folders("bart"), trainer=trainer), quiet=True).train(ROWS, run=tmp_path / "run")
    sizes = json.loads((tmp_path / "run" / "manifest.json").read_text())["batch_sizes"]
    assert {name: size["rows"] >= 1 for name, size in sizes.items()} == dict.fromkeys(
        ("generation", "evaluation", "training"), True
    )


def test_training_continues_in_smaller_parts_when_memory_runs_out(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from partita.lm.encoder_decoder.model import EncoderDecoderModel

    run = {"max_steps": 3, "skip_all_evaluation": True}
    base = save_encoder_decoder(tmp_path / "base", "t5", sharp=2.0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Model(make_config(base, trainer=run), quiet=True).train(ROWS, run=whole)
    cross_entropy = EncoderDecoderModel.cross_entropy

    def limited(self: EncoderDecoderModel, module: Any, batch: Any, **options: Any) -> torch.Tensor:
        if batch.rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cross_entropy(self, module, batch, **options)

    monkeypatch.setattr(EncoderDecoderModel, "cross_entropy", limited)
    Model(make_config(base, trainer=run), quiet=True).train(ROWS, run=parts)
    one, other = read_json_lines(whole / "log.jsonl"), read_json_lines(parts / "log.jsonl")
    assert [line["loss"] for line in other] == pytest.approx([line["loss"] for line in one], rel=1e-4)


DIALOGUE = {
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "output_features": [{"name": "reply", "type": "text"}],
}
TURNS = [("user", "one red"), ("assistant", "red"), ("user", "two blue"), ("assistant", "blue")]
DIALOGUES = [{"messages": [{"role": role, "content": text} for role, text in TURNS]} for _ in range(12)]


@pytest.mark.long
def test_every_answer_of_a_dialogue_is_learned_and_simulated(folders: Callable[[str], Path], tmp_path: Path) -> None:
    trainer = {"max_steps": 40, "learning_rate": 0.01}
    simulation = {"world": {"type": "replay"}, "tasks": {"source": str(tmp_path / "rows.jsonl")}}
    source = {"source": str(tmp_path / "rows.jsonl"), "batching": {"type": "bucket"}}
    write_json_lines(tmp_path / "rows.jsonl", DIALOGUES)
    config = make_config(folders("t5"), trainer=trainer, data=source, **DIALOGUE, simulation=simulation)
    model = Model(config, quiet=True)
    model.train(run=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "ledger.json").read_text())["splits"]["training"]["used"] == 2 * 10
    answers = model.predict([{"messages": DIALOGUES[0]["messages"][:-1]}, {"messages": DIALOGUES[0]["messages"][:1]}])
    assert [answer["reply"] for answer in answers] == ["blue", "red"]
    model.simulate(tmp_path / "out", batch_size=4)
    lines = read_json_lines(tmp_path / "out" / "predicted.jsonl")
    assert lines
    spoken = {turn["content"] for line in lines for turn in line["messages"] if turn["role"] == "assistant"}
    assert spoken == {"red", "blue"}


@pytest.mark.parametrize(
    ("sections", "status"),
    [({}, 0), ({"data": {"batching": {"type": "pack"}}}, 2)],
    ids=["bucket", "pack"],
)
def test_commands_train_and_preview_or_refuse(
    folders: Callable[[str], Path],
    sections: dict[str, Any],
    status: int,
    tmp_path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    config = make_config(folders("t5"), **sections)
    config["data"]["source"] = str(tmp_path / "rows.jsonl")
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    assert command("train", tmp_path / "run.yaml", "--run", tmp_path / "run") == status
    assert command("preview", tmp_path / "run.yaml") == status
    shown = capsys.readouterr()
    if status:
        assert "data.batching.type: pack joins rows in one sequence" in shown.err
    else:
        assert "red ball" in shown.out


def test_a_dialogue_without_room_for_the_encoder_is_an_error_with_the_fix(tmp_path: Path) -> None:
    base = save_encoder_decoder(tmp_path / "base", "bart", context=16)
    config = make_config(base, **DIALOGUE)
    with pytest.raises(DataError, match=r"the encoder reads; .*data.dialogue: \{context_tokens: ...\} shows less"):
        Model(config, quiet=True).train(DIALOGUES, run=tmp_path / "run")
