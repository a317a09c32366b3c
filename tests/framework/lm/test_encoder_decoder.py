"""Encoder-decoders: loss and gradients, generation, labels, adapters and files, against transformers."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.lm.base import BatchSupport, Constraint, GenerationOptions, GenerationRequest, Label
from partita.lm.encoder_decoder.model import EncoderDecoderModel
from partita.lm.model_config.encoders import heads_of_encoder
from partita_schema.errors import ConfigError, ModelError
from partita_trainers.base import Batch
from partita_trainers.sides import split_sides

from ...encoder_decoders import SIZES, save_encoder_decoder
from .conftest import gradients

BORDERS = (12, 3, 13, 2)
LENGTHS = (20, 9, 15, 6)
GREEDY = GenerationOptions({"do_sample": False})
LORA = {"type": "lora", "init": "gaussian"}
MERGED = LORA | {"postprocessor": {"merge_adapter_into_base_model": True}}
MERGED_OUTPUT = MERGED | {"modules_to_save": ["lm_head"]}


def build_batch(*, pad_token_id: int) -> Batch:
    """Return rows of random tokens whose answers start at BORDERS."""
    ids = torch.randint(5, 50, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    for row, (border, length) in enumerate(zip(BORDERS, LENGTHS, strict=True)):
        ids[row, length:] = pad_token_id
        labels[row, border:length] = ids[row, border:length]
    return Batch(ids, labels, torch.tensor(LENGTHS), tuple(f"row {row}" for row in range(len(LENGTHS))))


def build_requests() -> list[GenerationRequest]:
    rows = build_batch(pad_token_id=0).input_ids_BT.tolist()
    return [GenerationRequest(row[:length], 8 + length % 5) for row, length in zip(rows, LENGTHS, strict=True)]


def library_loss(module: Any, batch: Batch) -> torch.Tensor:
    """Return the loss that transformers computes from labels, as Seq2SeqTrainer calls it, as a sum."""
    sides = split_sides(batch)
    mean: torch.Tensor = module(
        input_ids=sides.input_ids_BS, attention_mask=sides.attention_mask_BS, labels=sides.labels_BT
    ).loss
    return mean * (sides.labels_BT != -100).sum()


def greedy_alone(lm: EncoderDecoderModel, request: GenerationRequest, **arguments: Any) -> tuple[int, ...]:
    """Return the new tokens that transformers' `generate` gives to one row, up to the end token."""
    ids = lm.base.generate(
        torch.tensor([list(request.input_ids)]),
        max_new_tokens=request.max_new_tokens,
        **{"do_sample": False, **arguments},
    )[0, 1:].tolist()
    end = lm.tokenizer.eos_token_id
    return tuple(ids[: ids.index(end)] if end in ids else ids)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: the folder of a saved model of an architecture."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = save_encoder_decoder(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return folder


@pytest.fixture(scope="module")
def models(small: Any, folders: Callable[[str], Path]) -> Callable[..., EncoderDecoderModel]:
    """Return a function: a loaded model of an architecture with sections of the config."""
    loaded: dict[str, Any] = {}

    def model(architecture: str, **sections: Any) -> Any:
        key = json.dumps([architecture, sections])
        if key not in loaded:
            loaded[key] = small.load(small.config(base_model=str(folders(architecture)), **sections))
        return loaded[key]

    return model


@pytest.mark.parametrize("architecture", SIZES)
def test_loss_and_gradients_equal_those_of_labels_in_transformers(models, architecture: str) -> None:
    lm = models(architecture)
    assert isinstance(lm, EncoderDecoderModel)
    batch = build_batch(pad_token_id=lm.tokenizer.pad_token_id)
    ours, theirs = lm.loss(lm.module, batch), library_loss(lm.module, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    a, b = gradients(ours, lm.module), gradients(theirs, lm.module)
    assert b.norm() > 0
    assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("architecture", SIZES)
def test_the_loss_is_the_negative_sum_of_token_log_probs_of_each_row_alone(models, architecture: str) -> None:
    lm = models(architecture)
    batch = build_batch(pad_token_id=lm.tokenizer.pad_token_id)
    log_probs = lm.token_log_probs(lm.module, batch).detach()
    torch.testing.assert_close(-log_probs.sum(), lm.loss(lm.module, batch).detach(), rtol=1e-6, atol=0)
    assert len(log_probs) == batch.loss_tokens
    for row, (border, length) in enumerate(zip(BORDERS, LENGTHS, strict=True)):
        prompt, answer = batch.input_ids_BT[row : row + 1, :border], batch.input_ids_BT[row : row + 1, border:length]
        logits = lm.base(input_ids=prompt, labels=answer).logits[0].double().log_softmax(-1)
        alone = logits.gather(1, answer.T)[:, 0].float().detach()
        torch.testing.assert_close(log_probs[batch.loss_token_rows == row], alone, rtol=0, atol=2e-4)


def test_only_positions_with_a_label_reach_the_output_layer(models) -> None:
    lm, seen = models("t5"), []
    batch = build_batch(pad_token_id=0)
    handle = lm.base.lm_head.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0].shape))
    lm.loss(lm.module, batch)
    handle.remove()
    assert seen == [(1, batch.loss_tokens, 32)]


def test_a_batch_without_labels_has_a_loss_of_0_without_a_forward_pass(models) -> None:
    lm, batch = models("t5"), build_batch(pad_token_id=0)
    empty = Batch(batch.input_ids_BT, torch.full_like(batch.labels_BT, -100), batch.lengths_B, batch.keys)
    loss = lm.loss(lm.module, empty)
    assert loss.item() == 0
    assert len(lm.token_log_probs(lm.module, empty)) == 0
    assert not any(gradient.any() for gradient in gradients(loss, lm.module))


@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_beams": 3, "length_penalty": 2.0},
        {"no_repeat_ngram_size": 2, "min_length": 6},
        {"encoder_no_repeat_ngram_size": 1, "repetition_penalty": 1.3},
        {"forced_bos_token_id": 9},
    ],
    ids=["greedy", "beams", "n-grams", "penalties", "forced first token"],
)
def test_answers_of_a_batch_equal_those_of_generate_for_each_row(models, architecture: str, arguments: dict) -> None:
    lm, requests = models(architecture), build_requests()
    options = GenerationOptions({"do_sample": False, **arguments})
    answers = lm.generate(requests, options, seed=0)
    assert [answer.ids for answer in answers] == [greedy_alone(lm, request, **arguments) for request in requests]
    assert len({answer.ids for answer in answers}) > 1


@pytest.mark.parametrize("architecture", SIZES)
def test_rows_that_have_ended_leave_the_model(models, architecture: str) -> None:
    lm, sizes = models(architecture), []
    prompts = build_requests()
    requests = [GenerationRequest(one.input_ids, limit) for one, limit in zip(prompts, (6, 2, 4, 2), strict=True)]
    handle = lm.base.get_output_embeddings().register_forward_hook(lambda layer, inputs, out: sizes.append(len(out)))
    never_ending = {"do_sample": False, "suppress_tokens": [lm.tokenizer.eos_token_id]}
    answers = lm.generate(requests, GenerationOptions(never_ending), seed=0)
    handle.remove()
    assert [answer.ids for answer in answers] == [greedy_alone(lm, one, **never_ending) for one in requests]
    assert sizes == [4, 4, 2, 2, 1, 1]


def test_a_batch_is_made_smaller_only_when_many_of_its_rows_have_ended(models) -> None:
    lm, sizes = models("t5"), []
    prompt = build_requests()[0].input_ids
    requests = [GenerationRequest(prompt, 5 if row else 2) for row in range(8)]
    handle = lm.base.get_output_embeddings().register_forward_hook(lambda layer, inputs, out: sizes.append(len(out)))
    lm.generate(requests, GREEDY, seed=0)
    handle.remove()
    assert set(sizes) == {8}


@pytest.mark.parametrize("architecture", SIZES)
def test_a_model_that_has_answered_is_trained_as_before(models, architecture: str) -> None:
    lm = models(architecture)
    batch = build_batch(pad_token_id=lm.tokenizer.pad_token_id)
    before = gradients(lm.loss(lm.module, batch), lm.module)
    lm.generate(build_requests(), GREEDY, seed=0)
    assert torch.equal(gradients(lm.loss(lm.module, batch), lm.module), before)
    assert not any(part.is_inference() for part in (*lm.module.parameters(), *lm.module.buffers()))


def test_an_answer_is_decoded_as_the_beginning_of_a_text(models) -> None:
    lm = models("t5")
    ids = lm.tokenizer("red ball")["input_ids"]
    assert lm.decode(ids) == "red ball"


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}])
def test_the_space_before_the_first_word_is_no_stop_text(models, arguments: dict) -> None:
    lm = models("t5")
    words = [token for text, token in lm.tokenizer.get_vocab().items() if text.startswith("\u2581") and len(text) > 1]
    others = [token for token in range(lm.vocabulary_size) if token not in words]
    settings = {"do_sample": False, "suppress_tokens": others, **arguments}

    answers = lm.generate(build_requests(), GenerationOptions(settings, stop=(" ",)), seed=0)

    for answer in answers:
        assert (len(answer.ids), answer.finish_reason) == (2, "stop")
        assert answer.text == lm.decode(answer.ids[:1])


def test_sampled_answers_depend_on_the_key_of_a_row_and_not_on_the_batch(models) -> None:
    lm = models("bart")
    options = GenerationOptions({"do_sample": True, "temperature": 5.0, "top_k": 0}, logprobs=True)
    requests = [GenerationRequest(one.input_ids, 8, key=bytes([row])) for row, one in enumerate(build_requests())]
    together = lm.generate(requests, options, seed=1)
    alone = [lm.generate([request], options, seed=1)[0] for request in reversed(requests)]
    assert [answer.ids for answer in together] == [answer.ids for answer in reversed(alone)]
    assert len({answer.ids for answer in together}) == len(requests)
    assert all(answer.logprob is not None and answer.logprob < 0 for answer in together)


@pytest.mark.parametrize("architecture", SIZES)
def test_scores_of_labels_are_the_log_probabilities_of_whole_answers(models, architecture: str) -> None:
    lm, requests = models(architecture), build_requests()
    end = lm.tokenizer.eos_token_id
    labels = (Label("one", (7, 8)), Label("two", (9, end)), Label("three", (7, 8, 11)))
    options = GenerationOptions({"do_sample": False}, labels=labels, logprobs=True)
    for request, answer in zip(requests, lm.generate(requests, options, seed=0), strict=True):
        wanted = {}
        for label in labels:
            ids = torch.tensor([[*(token for token in label.ids if token != end), end]])
            logits = lm.base(input_ids=torch.tensor([list(request.input_ids)]), labels=ids).logits[0]
            wanted[label.text] = float(logits.detach().double().log_softmax(-1).gather(1, ids.T).sum())
        assert answer.scores == pytest.approx(wanted, abs=2e-3)
        assert answer.text == max(wanted, key=wanted.__getitem__)
        assert answer.logprob == pytest.approx(wanted[answer.text], abs=2e-3)


def test_the_encoder_runs_once_per_batch_of_scored_rows(models) -> None:
    lm, calls = models("t5"), []
    handle = lm.base.get_encoder().register_forward_hook(lambda layer, inputs, output: calls.append(output[0].shape))
    labels = tuple(Label(str(token), (token, token + 1)) for token in range(5, 12))
    lm.generate(build_requests(), GenerationOptions({"do_sample": False}, labels=labels), seed=0)
    handle.remove()
    assert calls == [(4, 20, 32)]


@pytest.mark.parametrize("architecture", SIZES)
def test_rows_of_any_length_share_a_batch_and_slots_are_not_used(models, architecture: str) -> None:
    lm = models(architecture)
    assert lm.batch_support(GREEDY, tokens=30) == BatchSupport("padded", scores_labels=True)
    several = GenerationOptions(
        {"do_sample": False}, constraints=(Constraint(), Constraint(labels=(Label("one", (7,)),)))
    )
    assert not lm.batch_support(several, tokens=30).scores_labels
    assert lm.why_no_slots(GREEDY, tokens=30) == "an encoder next to the decoder"
    lm.check_loss()


def test_packing_and_guidance_are_refused(models) -> None:
    lm = models("t5")
    with pytest.raises(ModelError, match=r"rows cannot be packed for an encoder-decoder.*\{type: bucket\}"):
        lm.check_packing()
    with pytest.raises(ModelError, match=r"generation.guidance_scale: .* this is an encoder-decoder; remove it"):
        lm.batch_support(GenerationOptions({"guidance_scale": 2.0}), tokens=9)


def test_virtual_tokens_of_any_peft_method_are_refused(small, folders) -> None:
    adapter = {"type": "peft", "peft_type": "P_TUNING", "parameters": {"num_virtual_tokens": 3}}
    config = small.config(base_model=str(folders("t5")), adapter=adapter)
    with pytest.raises(ModelError, match=r"adapter.type: the virtual tokens of peft precede one text.*type: lora"):
        small.load(config)


def test_all_conflicts_with_the_two_sides_of_a_folder_are_reported_before_it_is_loaded(small, folders) -> None:
    config = small.config(
        base_model=str(folders("t5")),
        adapter={"type": "lora", "init": "eva"},
        data={"batching": {"type": "pack"}},
        model_parameters={"neftune_noise_alpha": 5.0},
    )
    with pytest.raises(ConfigError) as caught:
        heads_of_encoder(config, folder=Path())
    assert [problem.path for problem in caught.value.problems] == [
        "data.batching.type",
        "adapter.init",
        "model_parameters.neftune_noise_alpha",
    ]


def test_a_model_without_a_start_token_is_refused(small, folders, tmp_path: Path) -> None:
    shutil.copytree(folders("t5"), tmp_path, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        settings["decoder_start_token_id"] = None
        (tmp_path / name).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="names no decoder_start_token_id, the token that an answer starts with"):
        small.load(small.config(base_model=str(tmp_path)))


@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.parametrize("adapter", [LORA, {"type": "ia3"}], ids=lambda adapter: str(adapter["type"]))
def test_the_loss_under_an_adapter_equals_that_of_transformers(models, architecture: str, adapter: dict) -> None:
    lm = models(architecture, adapter=adapter)
    assert lm.adapted.active_peft_config.task_type == "SEQ_2_SEQ_LM"
    batch = build_batch(pad_token_id=lm.tokenizer.pad_token_id)
    ours, theirs = lm.loss(lm.module, batch), library_loss(lm.module, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    a, b = gradients(ours, lm.module), gradients(theirs, lm.module)
    assert b.norm() > 0
    assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_a_quantized_model_trains_an_adapter(small, folders, architecture: str, bits: int) -> None:
    config = small.config(base_model=str(folders(architecture)), adapter=LORA, quantization={"bits": bits})
    lm = small.load(config)
    batch = build_batch(pad_token_id=lm.tokenizer.pad_token_id)
    trained = [parameter for parameter in lm.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    with lm.training():
        for _ in range(8):
            loss = lm.loss(lm.module, batch)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]


def test_activation_checkpointing_gives_the_same_gradients(small, folders) -> None:
    sections = {"base_model": str(folders("t5")), "adapter": LORA}
    plain = small.load(small.config(**sections))
    trainer = {"type": "finetune", "gradient_checkpointing": True}
    saving = small.load(small.config(**sections, trainer=trainer))
    batch = build_batch(pad_token_id=0)
    with plain.training(), saving.training():
        a, b = plain.loss(plain.module, batch), saving.loss(saving.module, batch)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
        expected, found = gradients(a, plain.module), gradients(b, saving.module)
    assert (found - expected).norm() < 1e-4 * expected.norm()  # single entries are sums of much larger terms


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.parametrize("adapter", [None, LORA, MERGED, MERGED_OUTPUT], ids=["full", "lora", "merged", "output layer"])
def test_a_saved_model_loads_with_transformers_and_answers_the_same(
    small, folders, architecture: str, adapter: dict | None, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    lm = small.load(small.config(base_model=str(folders(architecture)), adapter=adapter))
    batch = build_batch(pad_token_id=lm.tokenizer.pad_token_id)
    with torch.no_grad():
        for parameter in lm.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.sign(parameter))
    lm.save(tmp_path)
    merged = adapter is None or "postprocessor" in adapter
    assert (tmp_path / "config.json").exists() == merged
    plain: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path if merged else folders(architecture))
    plain = (plain if merged else PeftModel.from_pretrained(plain, tmp_path)).eval()
    torch.testing.assert_close(lm.loss(lm.module, batch), library_loss(plain, batch), rtol=1e-4, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path)("red ball") == lm.tokenizer("red ball")
    again = small.load(lm.config, saved=tmp_path, trainable=False)
    assert again.fingerprint == lm.fingerprint or adapter in (MERGED, MERGED_OUTPUT)
    torch.testing.assert_close(lm.loss(lm.module, batch), again.loss(again.module, batch), rtol=1e-4, atol=0)


@pytest.mark.parametrize("architecture", SIZES)
def test_a_checkpoint_restores_the_weights_bit_for_bit(small, folders, architecture: str, tmp_path: Path) -> None:
    config = small.config(base_model=str(folders(architecture)))
    lm, batch = small.load(config), build_batch(pad_token_id=0)
    with torch.no_grad():
        next(lm.module.parameters()).mul_(0.5)
    lm.save_checkpoint(tmp_path)
    other = small.load(config)
    assert other.loss(other.module, batch).item() != lm.loss(lm.module, batch).item()
    other.load_checkpoint(tmp_path)
    assert other.loss(other.module, batch).item() == lm.loss(lm.module, batch).item()


def test_the_worst_case_generates_every_token_of_every_row(models) -> None:
    lm, steps = models("bart"), []
    lm.batch_support(GREEDY, tokens=12)  # its first call runs the model
    handle = lm.base.get_decoder().register_forward_hook(lambda layer, inputs, output: steps.append(1))
    timing = lm.generate_worst_case(3, prompt_tokens=12, new_tokens=7, options=GREEDY)
    handle.remove()
    assert len(steps) == 7
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    assert lm.time_decode_step(2, length=500, options=GREEDY) > 0
    for purpose in ("generation", "evaluation", "training"):
        less, more = (lm.estimated_bytes(purpose, rows, tokens=20, new_tokens=8, loss_tokens=5) for rows in (2, 4))
        assert 0 < less < more


def test_t5_in_float16_is_warned_about(small, folders, caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"model_parameters": {"dtype": "float16"}, "adapter": LORA}
    small.load(small.config(base_model=str(folders("bart")), **parameters))
    assert "float16" not in caplog.text
    small.load(small.config(base_model=str(folders("t5")), **parameters))
    assert "T5 overflows in float16, and its loss becomes NaN; write bfloat16 or float32" in caplog.text


@pytest.mark.parametrize("kind", ["mbart", "fsmt", "m2m_100", "encoder-decoder"])
def test_other_architectures_have_the_loss_of_transformers(kind: str, tmp_path: Path) -> None:
    """mBART starts answers with their last token, FSMT names its embedding as output layer, M2M100 shifts nothing."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        import architectures  # type: ignore[import-not-found]

        lm = architectures.saved_and_loaded(kind, tmp_path, two_sided=True)
        lm.check_loss()
        assert architectures.loss_difference(lm) < 1e-5


def test_a_decoder_that_reads_later_tokens_is_refused(models) -> None:
    lm = models("bart")
    layer = lm.base.get_decoder().layers[0].self_attn
    forward, layer.forward = (
        layer.forward,
        lambda *args, **kwargs: forward(*args, **(kwargs | {"attention_mask": None})),
    )
    causal, layer.is_causal = layer.is_causal, False
    lm.__dict__.pop("is_causal", None)
    try:
        with pytest.raises(ModelError, match="where other labels or padding follow: it would learn its answers"):
            lm.check_loss()
    finally:
        layer.forward, layer.is_causal = forward, causal
