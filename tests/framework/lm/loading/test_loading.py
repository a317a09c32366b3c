import json
import shutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from partita.lm.base import GenerationOptions
from partita.lm.devices import find_device
from partita.lm.loading import number_formats
from partita.tokenizers.hub import explain
from partita_schema.errors import ModelError
from partita_schema.sections.model import Architecture, ModelParameters
from partita_trainers.libraries.torch_internals import allocator_settings, set_allocator_settings

GREEDY = GenerationOptions({"do_sample": False, "num_beams": 1})


def scratch(**keys) -> dict:
    return {"type": "scratch", "tokenizer": "byte", "context_length": 64} | keys


@pytest.mark.parametrize("architecture", typing.get_args(Architecture))
def test_every_architecture_is_built_with_the_configured_shape(small, architecture: str) -> None:
    shape = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 160}
    lm = small.load(small.config(base_model=scratch(architecture=architecture, **shape)))
    described = lm.base.config
    assert described.model_type == architecture
    assert (described.hidden_size, described.num_hidden_layers, described.num_attention_heads) == (96, 3, 4)
    assert (lm.context_length, described.vocab_size, len(lm.tokenizer)) == (64, 258, 258)
    weights = {tuple(parameter.shape[-2:]) for parameter in lm.module.parameters()}
    assert weights & {(160, 96), (96, 160)}
    tied = lm.base.get_output_embeddings().weight is lm.base.get_input_embeddings().weight
    assert tied
    small.take_steps(lm, steps=1)


@pytest.mark.parametrize(("seconds", "chosen"), [((1.0, 0.5), torch.bfloat16), ((1.0, 0.9), torch.float32)])
def test_the_automatic_dtype_is_the_one_with_clearly_faster_matrix_products(
    small,
    base_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: tuple[float, float],
    chosen: torch.dtype,
) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    found = dict(zip((torch.float32, torch.bfloat16), seconds, strict=True))
    monkeypatch.setattr(number_formats, "dtype_seconds", lambda dtype, *, device: found[dtype])
    config = small.config(base_model=str(base_folder), model_parameters={"dtype": "fastest"}, trainer={"type": "none"})
    assert {p.dtype for p in small.load(config, trainable=False).module.parameters()} == {chosen}


def test_matrix_products_are_timed_in_both_dtypes() -> None:
    assert all(
        0 < number_formats.dtype_seconds(dtype, device=torch.device("cpu")) < 5
        for dtype in (torch.float32, torch.bfloat16)
    )


@pytest.mark.parametrize(
    ("size", "millions"), [("nano", 0.123), ("tiny", 0.837), ("mini", 4.886), ("small", 25.4), ("medium", 85.2)]
)
def test_named_sizes_have_the_number_of_parameters_in_their_name(small, size: str, millions: float) -> None:
    from transformers import AutoModelForCausalLM

    from partita.lm.model_config.architectures import scratch_config
    from partita.tokenizers.load import byte_tokenizer

    config = small.config(base_model=scratch(size=size))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scratch_config(config.base_model, tokenizer=byte_tokenizer()))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.01)


def test_embeddings_can_be_untied_and_heads_grouped(small) -> None:
    lm = small.load(small.config(base_model=scratch(size="tiny", tie_word_embeddings=False, num_key_value_heads=2)))
    assert lm.base.get_output_embeddings().weight is not lm.base.get_input_embeddings().weight
    assert lm.base.config.num_key_value_heads == 2


def test_a_new_model_depends_only_on_the_seed_and_keeps_the_global_random_state(small) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    config = small.config(adapter={"type": "lora", "init": "gaussian"})
    first = small.load(config)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second, other = small.load(config), small.load(config.model_copy(update={"seed": 5}))
    pairs = list(zip(first.module.parameters(), second.module.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.module.parameters()), next(other.module.parameters()))


def test_a_relative_folder_is_relative_to_the_configuration_file(small, base_folder: Path) -> None:
    lm = small.load(small.config(base_model=f"./{base_folder.name}"), folder=base_folder.parent)
    assert lm.source == str(base_folder.resolve())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("./smal", r"base_model: there is no folder .*smal; did you mean small\?"),
        ("./zzz", r"there is no folder .*zzz; .* holds small"),
        ("./no/where", r"there is no folder .*where; .*no does not exist either"),
        ("./small/config.json", r"config\.json is a file; write the folder that holds the model's files"),
        (".", r"holds no config\.json; write the folder that holds the model's files"),
    ],
)
def test_a_missing_folder_is_reported_with_similar_names(small, base_folder: Path, name: str, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        small.load(small.config(base_model=name), folder=base_folder.parent)


def test_an_unreachable_hub_model_is_reported(small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"base_model: nobody/nothing-here: cannot load its tokenizer: "):
        small.load(small.config(base_model="nobody/nothing-here"))


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (
            "We couldn't connect to 'https://huggingface.co' to load the files",
            "write its folder (for a trained run with --set base_model=FOLDER), or go online once",
        ),
        ("x is not a local folder and is not a valid model identifier listed on", "check the spelling, or log in"),
        ("You are trying to access a gated repo.", "log in with `hf auth login`"),
        ("main2 is not a valid git identifier (branch name, tag name", "check model_parameters.revision"),
        ("Please pass the argument `trust_remote_code=True` to allow custom code", "write trust_remote_code: true"),
        ("but Transformers does not recognize this architecture", "update transformers, or check the file"),
        ("something else", "cannot load its weights: OSError: something else"),
    ],
)
def test_errors_of_the_hub_become_advice(raised: str, text: str) -> None:
    message = explain(OSError(raised), source="a/b", part="weights", key="base_model")
    assert message.startswith("base_model: a/b: cannot load its weights: ")
    assert text in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "AutoModelForSequenceClassification",
            (
                "transformers has no AutoModelForSequenceClassification of its architecture, which reward models and "
                "outputs with head: linear need; choose a model of another architecture, such as Llama, Qwen or BERT, "
                "or remove the head, so that the model writes its answers"
            ),
        ),
        (
            "AutoModelForTokenClassification",
            (
                "transformers has no AutoModelForTokenClassification of its architecture, which outputs of type tags "
                "need; choose a model of another architecture, such as BERT or ModernBERT"
            ),
        ),
        (
            "AutoModelForSeq2SeqLM",
            "it is neither a causal language model nor an encoder-decoder, nor an encoder of text; choose one of these",
        ),
    ],
)
def test_an_architecture_without_a_head_is_not_said_to_be_no_language_model(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match="Unrecognized configuration class") as raised:
        getattr(transformers, name).from_config(transformers.MambaConfig())
    message = explain(raised.value, source="a/b", part="weights", key="base_model")
    assert message == f"base_model: a/b: cannot load its weights: {hint}"


@pytest.mark.parametrize(
    ("described", "text"),
    [
        (
            {"model_type": "bert"},
            "is a bert model, an encoder that writes no text; choose a causal language model or an",
        ),
        ({"model_type": "whisper"}, "is a whisper model, an encoder-decoder that does not only read text; choose one"),
        ({"model_type": "vision-encoder-decoder"}, "an encoder-decoder that does not only read text; choose one"),
        ({"model_type": "seamless_m4t"}, "an encoder-decoder that does not only read text; choose one that does"),
        ({"model_type": "t5gemma2"}, "an encoder-decoder that does not only read text; choose one that does"),
        ({"model_type": "from_the_future"}, "names no model type that transformers knows"),
        ({}, "names no model type that transformers knows"),
    ],
)
def test_a_folder_with_another_kind_of_model_is_refused(
    small, base_folder: Path, described: dict, text: str, tmp_path: Path
) -> None:
    small.load(small.config(base_model=str(base_folder))).tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match=text):
        small.load(small.config(base_model=str(tmp_path)))


def test_a_tokenizer_that_is_too_large_for_the_model_is_refused(small, tmp_path: Path) -> None:
    lm = small.load(small.config())
    lm.tokenizer.add_tokens(["<one>", "<two>"])
    lm.save(tmp_path)
    with pytest.raises(ModelError, match="its tokenizer has 260 tokens and its embedding 258"):
        small.load(small.config(base_model=str(tmp_path)))


@pytest.fixture
def chosen_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Return the GPUs that become the current one; undo settings of GPUs that a test makes."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield found
    torch.backends.cuda.enable_cudnn_sdp(before)
    set_allocator_settings("")


def test_devices_are_resolved_or_reported(monkeypatch: pytest.MonkeyPatch, chosen_gpus: list[torch.device]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device(ModelParameters()) == torch.device("cpu")
    with pytest.raises(ModelError, match=r"device: torch sees no cuda device here; write auto or cpu"):
        find_device(ModelParameters(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_device(ModelParameters()) == torch.device("cuda", 0)
    with pytest.raises(ModelError, match=r"there is no cuda:3; torch sees 1 cuda devices"):
        find_device(ModelParameters(device="cuda:3"))
    assert chosen_gpus == [torch.device("cuda", 0)]


def test_a_gpu_becomes_the_current_one_and_its_attention_plans_no_shapes(
    monkeypatch: pytest.MonkeyPatch, chosen_gpus: list[torch.device]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert find_device(ModelParameters(device="cuda:1")) == torch.device("cuda", 1)
    assert chosen_gpus == [torch.device("cuda", 1)]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.skipif(sys.platform != "linux", reason="torch grows segments on Linux")
@pytest.mark.usefixtures("chosen_gpus")
@pytest.mark.parametrize("begun", [False, True], ids=["before CUDA is initialized", "after"])
@pytest.mark.parametrize("mine", ["", "max_split_size_mb:64"])
def test_cuda_uses_expandable_segments_unless_the_allocator_is_configured(
    monkeypatch: pytest.MonkeyPatch, mine: str, begun: bool
) -> None:
    """torchrun and Ray initialize CUDA when they choose the device of a process, before it loads a model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
    monkeypatch.setattr(torch.version, "hip", None)
    set_allocator_settings(mine)
    find_device(ModelParameters(device="cpu"))
    assert allocator_settings() == mine
    find_device(ModelParameters())
    assert allocator_settings() == (mine or "expandable_segments:True")


def test_weights_have_the_configured_dtype_and_trained_weights_are_float32(small, base_folder: Path) -> None:
    half = {"base_model": str(base_folder), "model_parameters": {"dtype": "bfloat16"}}
    assert {p.dtype for p in small.load(small.config(**half)).module.parameters()} == {torch.float32}
    adapted = small.load(small.config(**half, adapter={"type": "lora"}))
    assert {p.dtype for p in adapted.module.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in adapted.module.parameters() if not p.requires_grad} == {torch.bfloat16}
    none = small.config(**half, trainer={"type": "none"})
    assert {p.dtype for p in small.load(none, trainable=False).module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "adapter",
    [{"type": "ln_tuning"}, {"type": "lora", "modules_to_save": ["lm_head", "embed_tokens"]}, {"type": "ia3"}],
    ids=lambda adapter: adapter["type"],
)
def test_parts_trained_in_float32_fit_into_a_bfloat16_model(
    small, base_folder: Path, adapter: dict, tmp_path: Path
) -> None:
    config = small.config(base_model=str(base_folder), model_parameters={"dtype": "bfloat16"}, adapter=adapter)
    lm = small.load(config)
    small.take_steps(lm, steps=2)
    lm.save(tmp_path)
    read = small.load(config, saved=tmp_path, trainable=False)
    assert small.held_out_loss(read) == small.held_out_loss(lm)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "linear", "factor": 2.0}, 128),
        ({"type": "dynamic", "factor": 4.0}, 256),
        ({"type": "yarn", "factor": 2.0}, 128),
        (
            {
                "type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            128,
        ),
        ({"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 2.0}, 128),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_rope_scaling_extends_the_context_and_is_saved_with_the_model(
    small, base_folder: Path, scaling: dict, length: int, tmp_path: Path
) -> None:
    config = small.config(base_model=str(base_folder), model_parameters={"rope_scaling": scaling})
    lm, plain = small.load(config), small.load(small.config(base_model=str(base_folder)))
    assert (lm.context_length, plain.context_length) == (length, 64)
    (answer,) = lm.generate(small.requests((60, 30)), GREEDY, seed=0)
    assert len(answer.ids) == 30 or answer.finish_reason == "stop"
    lm.save(tmp_path)
    read = small.load(config, saved=tmp_path, trainable=False)
    assert read.context_length == length
    long = small.batch(lengths=(100, 90))
    with torch.no_grad():
        assert read.loss(read.module, long).item() == lm.loss(lm.module, long).item()
        assert lm.loss(lm.module, long).item() != plain.loss(plain.module, long).item()


def test_rope_scaling_without_rotary_positions_is_refused(small, tmp_path: Path) -> None:
    scaling = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    small.load(small.config(architecture="gpt2")).save(tmp_path)
    with pytest.raises(ModelError, match="a gpt2 model has no rotary positions; remove it"):
        small.load(small.config(base_model=str(tmp_path), model_parameters=scaling))


@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
def test_factors_of_longrope_are_those_of_all_frequencies(small, base_folder: Path, key: str) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16} | {key: [1.0]}
    with pytest.raises(ModelError) as caught:
        small.load(small.config(base_model=str(base_folder), model_parameters={"rope_scaling": scaling}))
    assert str(caught.value) == (
        f"model_parameters.rope_scaling.{key} has 1 number, and a head of the model has 16 frequencies; write one "
        "number for each"
    )


def test_frozen_layers_are_not_trained(small) -> None:
    config = small.config(trainer={"type": "finetune", "layers_to_freeze_regex": r"layers\.0\.|embed"})
    lm = small.load(config)
    trained = {name for name, parameter in lm.module.named_parameters() if parameter.requires_grad}
    assert not any("layers.0." in name or "embed" in name for name in trained)
    before = {name: parameter.clone() for name, parameter in lm.module.named_parameters()}
    small.take_steps(lm, steps=1)
    changed = {name for name, parameter in lm.module.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trained


@pytest.mark.parametrize(("pattern", "count"), [("nothing_like_it", "no"), (".", "every")])
def test_freezing_nothing_or_everything_is_refused(small, pattern: str, count: str) -> None:
    config = small.config(trainer={"type": "finetune", "layers_to_freeze_regex": pattern})
    with pytest.raises(
        ModelError, match=rf"layers_to_freeze_regex: .* matches {count} trained parameter; .*embed_tokens"
    ):
        small.load(config)


def test_nothing_requires_gradients_without_training(small) -> None:
    lm = small.load(small.config(trainer={"type": "none"}), trainable=False)
    assert not any(parameter.requires_grad for parameter in lm.module.parameters())
    assert lm.loss(lm.module, small.batch(lengths=(1,))).item() == 0


def cached_on_the_hub(model: Path, cache: Path, *, commit: str) -> None:
    """Put the files of `model` into a Hub cache as nobody/tiny, with `main` at this commit."""
    repository = cache / "models--nobody--tiny"
    shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def test_the_fingerprint_of_a_hub_model_changes_with_its_revision(
    small, base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = small.config(base_model="nobody/tiny", trainer={"type": "none"})
    fingerprints = []
    for commit in ("a" * 40, "b" * 40):
        cached_on_the_hub(base_folder, tmp_path, commit=commit)
        fingerprints += [small.load(config, trainable=False).fingerprint for _ in range(2)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2] == fingerprints[3]
    fixed = small.config(base_model="nobody/tiny", trainer={"type": "none"}, model_parameters={"revision": "a" * 40})
    before = small.load(fixed, trainable=False).fingerprint
    (tmp_path / "models--nobody--tiny" / "refs" / "main").unlink()
    assert small.load(fixed, trainable=False).fingerprint == before


def test_virtual_tokens_that_fill_the_context_are_reported(small, tmp_path: Path) -> None:
    small.load(small.config()).save(tmp_path / "base")
    adapter = {"type": "prompt_tuning", "num_virtual_tokens": 600}
    config = small.config(base_model=str(tmp_path / "base"), adapter=adapter)
    with pytest.raises(ModelError, match=r"adapter.num_virtual_tokens: 600 virtual tokens leave no room for a row"):
        small.load(config)
