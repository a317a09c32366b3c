"""Tests of runs of reward models: training, files, predictions and evaluations."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita import Model
from partita.backends.reward_models import load_answer_scorer
from partita.data.preview import preview
from partita.pipeline.answer_scores import AnswerScore
from partita.tokenizers.load import train_tokenizer
from partita_schema.errors import ConfigError, DataError, ModelError, PartitaError
from partita_schema.load import load_config
from partita_schema.sections.model import ScratchModel

from ..head_models import tiny_model, write_plain
from ..json_lines import log_of, write_json_lines

WORDS = ("the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RATE: dict[str, Any] = {"learning_rate": 0.01, "learning_rate_scheduler": {"decay": "constant"}}
DIALOGUE = [{"name": "messages", "type": "dialogue"}]


def make_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def text(longest: int) -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(1, longest))))

    rows = []
    for _ in range(count):
        answer = text(4)
        rows.append({"prompt": text(5), "chosen": f"{answer} good", "rejected": f"{answer} bad", "by": 0.5})
    return rows


def settings(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "base_model": tiny_model("llama"),
        "input_features": [{"name": "prompt"}],
        "output_features": [{"name": "answer", "type": "preference"}],
        "data": {"source": "rows.jsonl"},
        "trainer": {"type": "reward", "batch_size": 8, "effective_batch_size": 8, "max_steps": 4, **RATE},
    }
    return base | changes


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with rows.jsonl."""
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", make_rows(60))
    return tmp_path


def train(config: dict[str, Any], run: Path, **trainer: Any) -> Model:
    model = Model(config | {"trainer": config["trainer"] | trainer}, quiet=True)
    model.train(run=run)
    return model


def write_chat_model(folder: Path) -> Path:
    """Write a causal language model with a chat template, whose tokens are bytes."""
    from transformers import AutoModelForCausalLM

    base = tiny_model("llama", tokenizer="byte", vocab_size=300, context_length=128)
    write_plain(folder, base, AutoModelForCausalLM, texts=["a"], describe=lambda described: None)
    tokenizer = train_tokenizer(ScratchModel.model_validate(base), iter(["a"]))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def plain_scores(model: Any, folder: Path, rows: list[dict[str, Any]], column: str) -> list[float]:
    """Return the scores of a model of transformers for answers, one by one, with the tokens of fine-tuning."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [tokenizer([row["prompt"], row[column]], add_special_tokens=False)["input_ids"] for row in rows]
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])).logits.item()
            for prompt, answer in parts
        ]


def test_predictions_equal_the_scores_of_plain_transformers(workspace: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForSequenceClassification

    with caplog.at_level("INFO", logger="partita"):
        train(settings(), workspace / "run")
    assert "answers are scored for 8 rows at a time, as trainer.batch_size says" in caplog.text
    folder, rows = workspace / "run" / "model", make_rows(6, seed=3)
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    assert plain.config.num_labels == 1
    assert plain.config.architectures == ["LlamaForSequenceClassification"]
    chosen, rejected = (plain_scores(plain, folder, rows, name) for name in ("chosen", "rejected"))

    singles = [{"prompt": row["prompt"], "answer": row["rejected"]} for row in rows]
    answers = list(Model.load(workspace / "run").predict([*rows, *singles], batch_size=5))

    assert [row["answer_score"] for row in answers[:6]] == pytest.approx(chosen, abs=1e-5)
    assert [row["answer_rejected_score"] for row in answers[:6]] == pytest.approx(rejected, abs=1e-5)
    assert [row["answer_score"] for row in answers[6:]] == pytest.approx(rejected, abs=1e-5)
    assert {row["answer_rejected_score"] for row in answers[6:]} == {None}
    assert np.std(chosen) > 1e-3


def test_scores_of_dialogues_are_those_of_the_chat_template(workspace: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = write_chat_model(workspace / "base")
    rows = [{**row, "messages": [{"role": "user", "content": row["prompt"]}]} for row in make_rows(40)]
    rows = [{name: row[name] for name in ("messages", "chosen", "rejected")} for row in rows]
    write_json_lines(workspace / "rows.jsonl", rows)
    train(settings(base_model=str(base), input_features=DIALOGUE), workspace / "run")
    folder = workspace / "run" / "model"
    plain, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    whole = [[*row["messages"], {"role": "assistant", "content": row["chosen"]}] for row in rows[:3]]
    with torch.no_grad():
        ids = [tokenizer.apply_chat_template(one, return_tensors="pt", return_dict=True) for one in whole]
        expected = [plain(input_ids=one["input_ids"]).logits.item() for one in ids]

    columns = [
        *({"messages": one} for one in whole),
        *({"messages": row["messages"], "answer": row["chosen"]} for row in rows[:3]),
        *rows[:3],
    ]
    answers = list(Model.load(workspace / "run").predict(columns))

    assert [row["answer_score"] for row in answers] == pytest.approx(expected * 3, abs=1e-5)
    assert [row["answer_rejected_score"] is None for row in answers] == [True] * 6 + [False] * 3
    [shown] = preview(
        load_config(settings(base_model=str(base), input_features=DIALOGUE)).config, folder=workspace, count=1
    ).rows
    assert [(piece.name, piece.text) for piece in shown.pieces] == [
        ("", f"<|user|>{rows[0]['messages'][0]['content']}</s>\n<|assistant|>"),
        ("chosen", f"{rows[0]['chosen']}</s>\n"),
        ("rejected", f"{rows[0]['rejected']}</s>\n"),
    ]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # of peft
@pytest.mark.parametrize("merged", [False, True], ids=["adapter", "merged"])
def test_lora_trains_a_reward_model_that_peft_loads(workspace: Path, merged: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    rows = make_rows(4, seed=3)
    texts = [str(text) for row in make_rows(30) for text in row.values()]
    base = write_plain(
        workspace / "base", tiny_model("llama"), AutoModelForCausalLM, texts=texts, describe=lambda described: None
    )
    adapter = {"type": "lora", "r": 2, "postprocessor": {"merge_adapter_into_base_model": merged}}
    train(settings(base_model=str(base), adapter=adapter), workspace / "run")
    folder = workspace / "run" / "model"
    if merged:
        plain = AutoModelForSequenceClassification.from_pretrained(folder)
    else:
        whole = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        plain = PeftModel.from_pretrained(whole, str(folder))
    expected = plain_scores(plain.eval(), folder, rows, "chosen")

    answers = Model.load(workspace / "run").predict(rows)

    assert answers["answer_score"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_train_a_reward_model(workspace: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    base = write_chat_model(workspace / "base")
    changes = {"base_model": str(base), "adapter": {"type": "lora", "r": 2}, "quantization": {"bits": bits}}
    model = train(settings(**changes), workspace / "run", max_steps=2)

    assert {row["status"] for row in model.predict(make_rows(3))} == {"ok"}


def test_a_reward_model_learns_which_answer_is_better(workspace: Path) -> None:
    model = train(settings(), workspace / "run", max_steps=15)
    metrics = model.evaluate(make_rows(30, seed=4))

    assert metrics["answer"] == {"n": 30.0}
    assert metrics["model"]["rewards/accuracies"] > 0.9
    assert metrics["model"]["rewards/margins"] > 0
    assert metrics["model"]["loss"] < 0.6
    scores = list(model.predict(make_rows(30, seed=4)))
    right = [row["answer_score"] > row["answer_rejected_score"] for row in scores]
    assert sum(right) / 30 == pytest.approx(metrics["model"]["rewards/accuracies"])


def test_a_margin_of_the_data_is_a_part_of_the_loss(workspace: Path) -> None:
    output = [{"name": "answer", "type": "preference", "margin": "by"}]
    plain, with_margin = (
        train(settings(**changes), workspace / name, max_steps=1)
        for name, changes in (("plain", {}), ("margin", {"output_features": output}))
    )
    losses = [log_of(workspace / name)[0]["loss"] for name in ("plain", "margin")]

    assert losses[1] > losses[0]
    assert with_margin.evaluate(make_rows(5))["model"]["loss"] > plain.evaluate(make_rows(5))["model"]["loss"]
    assert with_margin.predict([{"prompt": "a cat", "answer": "good"}])["status"] == ["ok"]


@pytest.mark.parametrize(
    ("data", "trainer"),
    [
        ({"batching": {"type": "pack"}}, {}),
        ({"batching": {"type": "token_budget", "max_tokens": 120}}, {"batch_size": "auto"}),
        ({"source": {"type": "jsonl", "path": "rows.jsonl", "streaming": True}}, {}),
        ({}, {"batch_size": "auto"}),
        ({}, {"mixed_precision": "bf16", "gradient_checkpointing": True}),
        ({}, {"steps_per_evaluation": 1, "early_stop": 1, "validation_metric": "rewards/accuracies"}),
    ],
    ids=["packed", "token budget", "stream", "auto", "bf16", "early stop"],
)
def test_reward_models_train_as_other_models(workspace: Path, data: dict[str, Any], trainer: dict[str, Any]) -> None:
    config = settings(data={"source": "rows.jsonl", **data})
    model = train(config, workspace / "run", **trainer)

    assert all("rewards/margins" in record for record in log_of(workspace / "run"))
    assert {row["status"] for row in model.predict(make_rows(3))} == {"ok"}


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True], ids=["single", "packed"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(workspace: Path, packed: bool) -> None:
    batching = {"batching": {"type": "pack"}} if packed else {}
    config = settings(data={"source": "rows.jsonl", **batching})
    train(config, workspace / "whole", steps_per_checkpoint=2)
    model = Model(config | {"trainer": config["trainer"] | {"steps_per_checkpoint": 2}}, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        model.train(run=workspace / "part", callbacks=[Stop(at=3)])
    train(config, workspace / "part", steps_per_checkpoint=2)

    weights = [(workspace / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert weights[0] == weights[1]


class Stop:
    """Ends the process, as Ctrl-C does."""

    def __init__(self, *, at: int) -> None:
        self.at = at

    def on_step(self, state: Any) -> None:
        if state.step == self.at:
            raise KeyboardInterrupt


def test_a_reward_model_of_others_scores_and_is_evaluated_without_training(workspace: Path) -> None:
    train(settings(), workspace / "run")
    output = [{"name": "answer", "type": "preference", "head": "linear"}]
    zero_shot = settings(base_model=str(workspace / "run" / "model"), output_features=output, trainer={"type": "none"})
    rows = make_rows(5, seed=3)
    own, other = Model.load(workspace / "run"), Model(zero_shot, quiet=True)

    assert other.predict(rows)["answer_score"] == pytest.approx(own.predict(rows)["answer_score"], abs=1e-6)
    metrics = other.evaluate(rows)["model"]
    assert metrics == pytest.approx(own.evaluate(rows)["model"], abs=1e-6)


def test_a_model_without_a_head_scores_nothing_without_training(workspace: Path) -> None:
    base = write_chat_model(workspace / "base")
    output = [{"name": "answer", "type": "preference", "head": "linear"}]
    with pytest.raises(ModelError) as caught:
        Model(settings(base_model=str(base), output_features=output, trainer={"type": "none"}), quiet=True).predict(
            make_rows(1)
        )
    assert str(caught.value) == (
        f"base_model: {base} has no head, and a new one has random weights; write trainer: {{type: reward}}, or name "
        "a model that was trained as a reward model"
    )


@pytest.fixture
def trained(workspace: Path) -> Path:
    train(settings(), workspace / "run", max_steps=1)
    return workspace / "run"


def test_rows_that_cannot_be_scored_have_a_reason(trained: Path) -> None:
    long = " ".join(["cat"] * 20)
    rows = [
        {"prompt": "a cat", "chosen": "good", "rejected": None, "answer": None},
        {"prompt": "a cat", "chosen": None, "rejected": None, "answer": None},
        {"prompt": "a cat", "chosen": None, "rejected": None, "answer": long},
        {"prompt": long, "chosen": None, "rejected": None, "answer": "good"},
        {"prompt": "a cat", "chosen": "good", "rejected": "good", "answer": None},
        {"prompt": "a cat", "chosen": "good", "rejected": None, "answer": "good"},
    ]
    answers = list(Model.load(trained).predict(rows))

    assert [row["error"] for row in answers] == [
        "column rejected is missing or empty",
        "column answer is missing or empty; write an answer to score there, or two in chosen and rejected",
        "the answer is 7 tokens too long, and its end decides the score",
        "the prompt leaves no room for an answer within 16 tokens",
        "the answers in the columns chosen and rejected are equal",
        None,
    ]
    assert [row["answer_score"] is None for row in answers] == [True] * 5 + [False]


def test_a_dataset_without_answers_is_refused(trained: Path) -> None:
    with pytest.raises(DataError) as caught:
        Model.load(trained).predict([{"prompt": "a cat", "text": "good"}])
    assert str(caught.value) == (
        "dataset has no answers to score: write one in the column 'answer', or two in 'chosen' and 'rejected'; its "
        "columns are prompt, text"
    )


def test_pairs_longer_than_the_context_are_scored_if_each_answer_fits(trained: Path) -> None:
    answer = " ".join(["cat"] * 8)
    pair = {"prompt": "a cat on", "chosen": f"{answer} good", "rejected": f"{answer} bad"}
    model = Model.load(trained)
    singles = [{"prompt": pair["prompt"], "answer": pair[name]} for name in ("chosen", "rejected")]
    [row] = model.predict([pair])

    assert row["error"] is None
    assert [row["answer_score"], row["answer_rejected_score"]] == pytest.approx(
        model.predict(singles)["answer_score"], abs=1e-5
    )


def test_an_encoder_is_a_reward_model_too(workspace: Path) -> None:
    model = train(settings(base_model=tiny_model("bert")), workspace / "run")
    rows = make_rows(4, seed=3)
    singles = [{"prompt": row["prompt"], "answer": row["rejected"]} for row in rows]

    assert model.predict(rows)["answer_rejected_score"] == pytest.approx(
        model.predict(singles)["answer_score"], abs=1e-5
    )


def test_texts_without_inputs_share_their_beginning(workspace: Path) -> None:
    rows = [{name: f"{row['prompt']} : {row[name]}" for name in ("chosen", "rejected")} for row in make_rows(40)]
    write_json_lines(workspace / "rows.jsonl", rows)
    model = train(settings(input_features=[]), workspace / "run")
    answers = model.predict([*rows[:3], *({"answer": row["chosen"]} for row in rows[:3])])

    assert answers["answer_score"][:3] == pytest.approx(answers["answer_score"][3:], abs=1e-5)


# Scores for other parts of partita


def test_a_scorer_scores_answers_to_rows_and_dialogues(trained: Path) -> None:
    scorer = load_answer_scorer(trained, key="generation.reward", quiet=True)
    model, rows = Model.load(trained), make_rows(4, seed=3)
    expected = model.predict(rows)["answer_score"]
    texts = [row["chosen"] for row in rows]

    assert [scorer.scores(row, [text])[0].value for row, text in zip(rows, texts, strict=True)] == pytest.approx(
        expected, abs=1e-5
    )
    assert scorer.scores({"prompt": ""}, ["good"]) == [AnswerScore(None, "column prompt is missing or empty")]
    messages = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    again = scorer.scores_of_dialogues(messages, texts)
    assert [score.value for score in again] == pytest.approx(expected, abs=1e-5)
    assert scorer.scores(rows[0], []) == []
    assert scorer.fingerprint == load_answer_scorer(trained, key="generation.reward", quiet=True).fingerprint


def test_several_answers_to_a_row_have_the_scores_of_each_alone(trained: Path) -> None:
    scorer = load_answer_scorer(trained, key="generation.reward", quiet=True)
    lm, row = scorer.pipeline.lm, {"prompt": "the cat sat on a mat"}
    answers = ["good", "the dogs ran", "", "the dogs", " ".join(["cat"] * 20), "good"]
    with counted_passes(lm.module) as passes:
        together = scorer.scores(row, answers)
    alone = [scorer.scores(row, [answer])[0] for answer in answers]

    assert passes == [1], "one line with the prompt and its answers"
    assert [score.error for score in together] == [score.error for score in alone]
    assert [score.value for score in together if score.error is None] == pytest.approx(
        [score.value for score in alone if score.error is None], abs=1e-5
    )
    assert [score.error is None for score in together] == [True, True, False, True, False, True]


@contextmanager
def counted_passes(module: torch.nn.Module) -> Iterator[list[int]]:
    """Yield the number of lines of each forward pass in the context."""
    lines: list[int] = []
    hook = module.register_forward_pre_hook(
        lambda module, arguments, named: lines.append(len(named["input_ids"])), with_kwargs=True
    )
    try:
        yield lines
    finally:
        hook.remove()


def test_a_scorer_refuses_what_it_cannot_read(trained: Path) -> None:
    scorer = load_answer_scorer(trained, key="generation.reward", quiet=True)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    with pytest.raises(ConfigError) as caught:
        scorer.scores_of_dialogues([turns], ["d"])
    assert str(caught.value) == (
        "input_features: the reward model reads prompt, and the prompts are dialogues of up to 3 messages; name a "
        "reward model with an input of type dialogue"
    )


def test_a_reward_model_writes_no_turns_of_dialogues(workspace: Path) -> None:
    base = write_chat_model(workspace / "base")
    rows = [{**row, "messages": [{"role": "user", "content": row["prompt"]}]} for row in make_rows(40)]
    write_json_lines(workspace / "rows.jsonl", [{name: row[name] for name in row if name != "prompt"} for row in rows])
    file = settings(base_model=str(base), input_features=DIALOGUE)
    train(file, workspace / "run", max_steps=1)
    with pytest.raises(PartitaError) as caught:
        Model.load(workspace / "run", overrides=["simulation.world.type=replay"], quiet=True).simulate()
    assert str(caught.value) == (
        "there is nothing to simulate with a head: it writes no text; write a file with a model that answers"
    )
    answering = settings(
        base_model=str(base),
        input_features=DIALOGUE,
        output_features=[{"name": "reply", "type": "text"}],
        trainer={"type": "none"},
        simulation={
            "world": {"type": "user_sim", "first": "a"},
            "tasks": {"count": 1},
            "agents": {"user": {"type": "model", "run": str(workspace / "run")}},
        },
    )
    with pytest.raises(ConfigError) as refused:
        Model(answering, quiet=True).simulate()
    assert "its model has a head and writes no text; name a model that answers" in str(refused.value)


def test_a_dialogue_without_an_answer_has_a_reason(workspace: Path) -> None:
    base = write_chat_model(workspace / "base")
    turn = [{"role": "user", "content": "a cat"}]
    rows = [{"messages": turn, "chosen": row["chosen"], "rejected": row["rejected"]} for row in make_rows(20)]
    write_json_lines(workspace / "rows.jsonl", rows)
    model = train(settings(base_model=str(base), input_features=DIALOGUE), workspace / "run", max_steps=1)
    answers = model.predict([{"messages": turn, "answer": None}, {"messages": turn, "chosen": "good"}])

    assert answers["error"] == [
        (
            "column messages: the dialogue ends with a message of the user, so there is no answer to score; write one "
            "in the column answer"
        ),
        "column messages: column rejected is missing or empty",
    ]


def test_a_run_that_is_no_reward_model_scores_nothing(workspace: Path) -> None:
    config = settings(trainer={"type": "preference", "loss": {"type": "simpo"}, "batch_size": 8, "max_steps": 1})
    Model(config, quiet=True).train(run=workspace / "dpo")
    trained, missing = workspace / "dpo", workspace / "none"
    reasons = {
        trained: f"{trained} is a run of trainer: {{type: preference}}, which scores no answers; name a run with "
        "trainer: {type: reward}",
        missing: f"{missing} is neither a run directory nor a saved model: it has no manifest.json or partita.json",
    }
    for folder, reason in reasons.items():
        with pytest.raises(ConfigError) as caught:
            load_answer_scorer(folder, key="generation.reward", quiet=True)
        assert str(caught.value).startswith(f"generation.reward: {reason}")
