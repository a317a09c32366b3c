"""Tests that token ids, loss tokens and the loss at step 0 equal those of TRL's SFTTrainer.

TRL is not a dependency. Its behaviour (version 1.16, `SFTTrainer._prepare_dataset`) is reproduced here with
transformers: the joined text is encoded once; a completion starts after the tokens of its prompt, and the text of the
end token is appended to plain completions; in dialogues the loss covers the tokens that contain a character of a `{%
generation %}` span."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import Example, RowTokenizer
from partita.tokenizers.load import byte_pair_backend, read_tokenizer, wrap
from partita_schema.config import Config

from .tokenizers_of_tests import space_marking

pytestmark = pytest.mark.long

STORIES = Path(__file__).parents[5] / "shared" / "models" / "stories260k"
ROWS = [
    {
        "question": f"{name} has {number} red balls.{end}",
        "answer": f"{gap}She  gave {number - 1} to Tim.\nOne was left!",
    }
    for number, name in enumerate(
        ("Lily", "A dog", "  Mom", "\u00c9lodie", "Tim's big friend", "\u65e5\u672c"), start=2
    )
    for end, gap in ((" What then?\n", ""), (" And then:", " "))
]
DIALOGUES = [
    [
        {"role": "user", "content": f"{row['question'].strip()} Hi."},
        {"role": "assistant", "content": row["answer"].strip()},
        {"role": "user", "content": "And  what happened next?"},
        {"role": "assistant", "content": "They were happy.\n\nThe end."},
        {"role": "user", "content": "Oh"},
        {"role": "assistant", "content": "\u00c9t\u00e9!"},
    ]
    for row in ROWS
]
TEXTS = [row["question"] + row["answer"] for row in ROWS] * 20
TEMPLATES = {
    # As in Qwen's template, whose TRL variant also marks the line breaks around an answer.
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ '\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # As in Llama 3's template: the mark is around content and end of turn.
    "headers": (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
    ),
    # As in Llama 2's template: spaces instead of tokens, and a mark that begins after a space.
    "spaces": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ ' ' }}{% generation %}{{ m.content + ' ' + eos_token }}{% endgeneration %}"
        "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    # As in Zephyr's template: role names in plain text, and a line break after the end.
    "lines": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|>\n' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ '<|user|>\n' + m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
}


class Labelled(NamedTuple):
    """A row as prepared by TRL."""

    ids: list[int]
    in_loss: list[bool]


def plain_of_trl(tokenizer: Any, prompt: str, completion: str) -> Labelled:
    """Return a prompt and its completion; the prompt's tokens are the common prefix of both encodings."""
    alone = tokenizer(prompt)["input_ids"]
    joined = tokenizer(prompt + completion + tokenizer.eos_token)["input_ids"]
    assert joined[: len(alone)] == alone, "TRL warns about such a row: its prompt is tokenized differently at inference"
    return Labelled(joined, [index >= len(alone) for index in range(len(joined))])


def chat_of_trl(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Labelled:
    """Return a dialogue with a mask of the tokens that contain a character of a marked span.

    TRL uses the mask of transformers, which includes only the first token of the last character of a span.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendering = {"return_assistant_tokens_mask": True, "enable_thinking": False}
    encoded = tokenizer.apply_chat_template(list(messages), return_dict=True, **rendering)
    template, special = tokenizer.chat_template, tokenizer.special_tokens_map
    [text], [spans] = render_jinja_template([list(messages)], chat_template=template, **rendering, **special)
    exact = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert exact["input_ids"] == encoded["input_ids"]
    mask = [any(start < high and low < end for low, high in spans) for start, end in exact["offset_mapping"]]
    lasts = [high - 1 for _, high in spans]
    for bit, flag, (start, end) in zip(encoded["assistant_masks"], mask, exact["offset_mapping"], strict=True):
        assert bool(bit) == flag or any(start <= last < end for last in lasts)
    return Labelled(exact["input_ids"], mask)


def completion_of_trl(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Labelled:
    """Return the last answer of a dialogue as a completion: all text of the template after the prompt."""
    rendering = {"return_dict": True, "enable_thinking": False}
    alone = tokenizer.apply_chat_template(list(messages[:-1]), add_generation_prompt=True, **rendering)["input_ids"]
    joined = tokenizer.apply_chat_template(list(messages), **rendering)["input_ids"]
    assert joined[: len(alone)] == alone
    return Labelled(joined, [index >= len(alone) for index in range(len(joined))])


def tokenizer_named(name: str) -> Any:
    if name == "stories260k":
        if not STORIES.exists():
            pytest.skip("the shared stories260k model is not next to the repository")
        tokenizer = read_tokenizer(str(STORIES))
    elif name == "byte pairs":
        tokenizer = wrap(byte_pair_backend(TEXTS, vocab_size=500), max_length=None)
        tokenizer.add_special_tokens({"bos_token": "<s>"})
    else:
        tokenizer = space_marking(TEXTS, scheme=name if name != "prepend" else None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


NAMES = ("byte pairs", "prepend", "first", "always", "stories260k")


def encoder_of(tokenizer: Any, **sections: Any) -> RowTokenizer:
    config = {
        "base_model": "unused",
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
    return build_row_tokenizer(Config.model_validate(config | sections), tokenizer=tokenizer, context_length=None)


def packed(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Example:
    """Return a dialogue as a row of partita, with all answers in the loss."""
    from partita_schema.rows import row_schema

    row_tokenizer = encoder_of(
        tokenizer,
        input_features=[{"name": "messages", "type": "dialogue"}],
        output_features=[{"name": "reply", "type": "text"}],
        data={"dialogue": {"mode": "packed_dialogue"}},
    )
    assert row_tokenizer.expander is not None
    [(key, row)] = row_tokenizer.expander.expand({"messages": [dict(message) for message in messages]}, "k")
    return row_tokenizer.encode(row_schema(row_tokenizer.formatter.config, supervised=True).load(row), key=key)


def as_labelled(example: Example) -> Labelled:
    return Labelled(example.input_ids, [label != -100 for label in example.labels])


def step_0_loss(rows: Sequence[Labelled], *, vocabulary: int) -> float:
    """Return the mean loss of all loss tokens under a model with fixed random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=vocabulary
    )
    model = LlamaForCausalLM(config).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids_1T = torch.tensor([row.ids])
            labels_T = torch.tensor([token if flag else -100 for token, flag in zip(*row, strict=True)])
            logits_TV = model(ids_1T).logits[0]
            losses = torch.nn.functional.cross_entropy(logits_TV[:-1], labels_T[1:], reduction="sum")
            total, count = total + float(losses), count + int((labels_T[1:] != -100).sum())
    return total / count


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_completion_have_the_tokens_and_loss_of_trl(name: str) -> None:
    tokenizer = tokenizer_named(name)
    row_tokenizer = encoder_of(tokenizer)

    ours = [as_labelled(row_tokenizer.encode(row, key="k")) for row in ROWS]

    theirs = [plain_of_trl(tokenizer, row["question"], row["answer"]) for row in ROWS]
    assert ours == theirs
    assert step_0_loss(ours, vocabulary=len(tokenizer)) == step_0_loss(theirs, vocabulary=len(tokenizer))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", NAMES)
def test_dialogues_with_generation_marks_have_the_tokens_and_loss_of_trl(name: str, template: str) -> None:
    tokenizer = tokenizer_named(name)
    tokenizer.chat_template = TEMPLATES[template]

    ours = [as_labelled(packed(tokenizer, dialogue)) for dialogue in DIALOGUES]

    theirs = [chat_of_trl(tokenizer, dialogue) for dialogue in DIALOGUES]
    assert ours == theirs
    assert step_0_loss(ours, vocabulary=len(tokenizer)) == step_0_loss(theirs, vocabulary=len(tokenizer))


def without_marks(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_in_a_chat_without_marks_have_the_tokens_and_loss_of_trl_up_to_the_end_of_turn(
    name: str, template: str
) -> None:
    tokenizer = tokenizer_named(name)
    tokenizer.chat_template = without_marks(TEMPLATES[template])
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    row_tokenizer = encoder_of(tokenizer)
    rows = [{"question": row["question"].strip(), "answer": row["answer"].strip()} for row in ROWS]

    ours = [as_labelled(row_tokenizer.encode(row, key="k")) for row in rows]

    messages = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows
    ]
    theirs = []
    for dialogue in messages:
        ids, in_loss = completion_of_trl(tokenizer, dialogue)
        end = max(index for index, token in enumerate(ids) if token in ends)
        theirs.append(Labelled(ids, [flag and index <= end for index, flag in enumerate(in_loss)]))
    assert ours == theirs
    assert step_0_loss(ours, vocabulary=len(tokenizer)) == step_0_loss(theirs, vocabulary=len(tokenizer))


@pytest.mark.parametrize("name", NAMES)
def test_dialogues_without_marks_equal_those_whose_marks_end_with_the_turn(name: str) -> None:
    tokenizer = tokenizer_named(name)
    tokenizer.chat_template = TEMPLATES["lines"]
    theirs = [chat_of_trl(tokenizer, dialogue) for dialogue in DIALOGUES]

    tokenizer.chat_template = without_marks(TEMPLATES["lines"])

    assert [as_labelled(packed(tokenizer, dialogue)) for dialogue in DIALOGUES] == theirs
