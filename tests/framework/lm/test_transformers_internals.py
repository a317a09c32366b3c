"""Tests of the private parts of transformers that partita uses: they still exist and work the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import chat_template_utils

from partita.lm.transformers_internals import (
    ATTENTION,
    TemplateCompiler,
    are_packed,
    attention_of,
    attention_settings,
    is_stateful,
    optimized_for_decoding,
    packing_known,
    padding_known,
    prefill,
    replace_template_compiler,
    set_attention,
    updated_inputs,
)
from partita_trainers.base import Batch
from partita_trainers.libraries.accelerate_internals import layer_class_names

CONFIG = transformers.LlamaConfig(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
)


@contextmanager
def reported_as_change(what: str, *, file: str = "framework/partita/lm/transformers_internals.py") -> Iterator[None]:
    """Turn an error into a failure that names the function that does not work with this version of transformers."""
    try:
        yield
    except (AttributeError, AssertionError, TypeError) as error:
        pytest.fail(
            f"transformers {transformers.__version__} changed what {what} of {file} relies on "
            f"({type(error).__name__}: {error}): change that function",
            pytrace=False,
        )


def test_a_missing_attribute_is_reported_with_its_function_and_file() -> None:
    with pytest.raises(pytest.fail.Exception) as failure, reported_as_change("attention_of"):
        raise AttributeError("_attn_implementation")
    assert str(failure.value) == (
        f"transformers {transformers.__version__} changed what attention_of of "
        "framework/partita/lm/transformers_internals.py relies on (AttributeError: _attn_implementation): change that "
        "function"
    )


def test_the_attention_implementation_is_read_and_set_for_the_whole_model() -> None:
    with reported_as_change("attention_of or set_attention"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager")
        assert attention_of(model.config) == "eager"
        set_attention(model.config, "sdpa")
        assert attention_of(model.config) == "sdpa"
        assert {attention_of(part.config) for part in model.modules() if hasattr(part, "config")} == {"sdpa"}


def test_the_attention_is_set_by_the_attributes_of_all_configs() -> None:
    with reported_as_change("attention_settings or ATTENTION"):
        config = transformers.Gemma3Config(text_config={}, vision_config={}, attn_implementation="eager")
        settings = attention_settings(config)
        assert len(settings) == 3
        for one in settings:
            assert one[ATTENTION] == "eager"
            one[ATTENTION] = "sdpa"
        assert {attention_of(one) for one in (config, config.text_config, config.vision_config)} == {"sdpa"}


def test_models_report_whether_their_cache_can_be_cropped() -> None:
    with reported_as_change("is_stateful"):
        assert "_is_stateful" in vars(transformers.PreTrainedModel)
        assert is_stateful(transformers.MambaForCausalLM)
        assert not is_stateful(transformers.LlamaForCausalLM)


def test_a_decoding_loop_computes_what_generate_does() -> None:
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    prompt_BT = torch.tensor([[3, 4, 5], [6, 7, 8]])

    def two_tokens(model: Any, ids_BT: torch.Tensor, *, generation_config: Any, **inputs: Any) -> torch.Tensor:
        del inputs["logits_processor"], inputs["stopping_criteria"]
        outputs = prefill(model, ids_BT, generation_config, inputs)
        with optimized_for_decoding(model):
            inputs = updated_inputs(model, outputs, inputs)
            ids_BT = torch.cat([ids_BT, outputs.logits[:, -1:].argmax(-1)], dim=1)
            prepared = model.prepare_inputs_for_generation(ids_BT, next_sequence_length=1, **inputs)
            assert prepared["input_ids"].shape == (2, 1)
            outputs = model(**prepared)
        return torch.cat([ids_BT, outputs.logits[:, -1:].argmax(-1)], dim=1)

    with reported_as_change("prefill, updated_inputs or optimized_for_decoding"), torch.no_grad():
        settings: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
        ours = model.generate(prompt_BT, **settings, custom_generate=two_tokens)
        assert torch.equal(ours, model.generate(prompt_BT, **settings))


def test_the_layers_of_models_are_found() -> None:
    with reported_as_change("layer_class_names", file="trainers/partita_trainers/libraries/accelerate_internals.py"):
        assert layer_class_names(transformers.LlamaForCausalLM(CONFIG)) == {"LlamaDecoderLayer"}


def test_chat_templates_are_compiled_by_the_replaced_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reported_as_change("replace_template_compiler"):
        own: Any = chat_template_utils._compile_jinja_template
        monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", own)  # so that it is restored
        compiled: list[str] = []

        def build(original: TemplateCompiler) -> TemplateCompiler:
            assert original is own

            def compile_noted(template: str) -> Any:
                compiled.append(template)
                return original(template)

            return compile_noted

        replace_template_compiler(build)
        messages = [[{"role": "user", "content": "Hello"}]]
        texts, _ = chat_template_utils.render_jinja_template(
            conversations=messages, chat_template="{{ messages[0].content }}!"
        )
        assert (texts, compiled) == (["Hello!"], ["{{ messages[0].content }}!"])


@pytest.mark.parametrize("positions", [None, [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]], [[0, 1, 2, 3, 4, 5]] * 2])
def test_known_packing_gives_the_logits_that_transformers_computes_without(positions: list[list[int]] | None) -> None:
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    ids_BT = torch.arange(1, 13).view(2, 6)
    positions_BT = None if positions is None else torch.tensor(positions)
    packed = are_packed(Batch(ids_BT, ids_BT, torch.tensor([6, 6]), ("a", "b"), positions_BT))
    assert packed == (positions is not None and 0 in positions[0][1:])

    def logits() -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False).logits
        return found

    with reported_as_change("packing_known"), torch.no_grad():
        expected = logits()
        with packing_known(packed=packed):
            assert torch.equal(logits(), expected)
        with packing_known(packed=False):  # the model believes it
            assert torch.equal(logits(), expected) == (not packed)
        assert torch.equal(logits(), expected)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_a_mask_is_left_out_without_padding_and_is_not_read_if_padding_is_known(kind: str, padded: bool) -> None:
    from transformers import masking_utils

    create = getattr(masking_utils, f"create_{kind}_mask")
    config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=2, attn_implementation="sdpa")

    def mask(padding: torch.Tensor) -> torch.Tensor | None:
        arguments = {"past_key_values": None} if kind == "causal" else {}
        found: torch.Tensor | None = create(
            config=config,
            inputs_embeds=torch.zeros(2, 6, 16, device=padding.device),
            attention_mask=padding,
            **arguments,
        )
        return found

    padding = torch.ones(2, 6, dtype=torch.long)
    padding[1, 4:] = not padded
    with reported_as_change("padding_known"):
        plain = mask(padding)
        assert (plain is not None) == padded
        with padding_known(padded=padded):
            known = mask(padding)
            assert (mask(padding.to("meta")) is not None) == padded
        assert known is None if plain is None else torch.equal(plain, known)
        with padding_known(padded=not padded):  # transformers believes it
            assert (mask(padding) is None) == padded
        assert (mask(padding) is not None) == padded, "nothing is left of it"


@pytest.mark.parametrize("padded", [True, False])
def test_known_padding_is_compatible_with_compiled_models(padded: bool) -> None:
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    ids_BT, mask_BT = torch.arange(1, 13).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask_BT[1, 4:] = not padded
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    arguments = {"input_ids": ids_BT, "attention_mask": mask_BT, "use_cache": False}
    with torch.no_grad():
        expected = model(**arguments).logits
        with padding_known(padded=padded):
            found = compiled(**arguments).logits
    torch.testing.assert_close(found[mask_BT.bool()], expected[mask_BT.bool()])
