"""Tests of turns with several outputs as text and tokens: the loss, and prompts that equal the training text."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from partita.data.dialogue import for_loss, for_scores
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import Example, PromptExample, RowTokenizer
from partita.data.formatting.turns import build_turn_writer
from partita_schema.errors import RowError
from partita_schema.rows import row_schema

from .test_dialogue import examples, marked, turn

Make = Callable[..., Any]
OUTPUTS = [
    {"name": "state", "type": "json"},
    {"name": "action", "type": "category", "decoder": {"labels": ["ask", "tell"]}},
    {"name": "reply", "type": "text", "column": "content"},
]
SAID = [
    {"role": "user", "content": "x1"},
    {"role": "assistant", "content": "y1", "state": {"a": 1}, "action": "ask"},
    {"role": "user", "content": "x2"},
    {"role": "assistant", "content": "y2", "state": {"a": 1, "b": "c"}, "action": "tell"},
]
ROW = {"messages": SAID}
SPEAKERS = {"speakers": {"user": "U: ", "assistant": "A: "}, "delimiter": " | "}
FIRST, SECOND = '{"a":1}', '{"a":1,"b":"c"}'
NO_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last and m['role'] == 'assistant' %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
"""A template that leaves thoughts out of earlier turns, like Qwen 3's."""
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def encoder_of(
    make_config: Make, tokenizer: Any, *, outputs: Any = None, limit: int | None = None, **dialogue: Any
) -> RowTokenizer:
    features = {"input_features": [{"name": "messages", "type": "dialogue"}], "output_features": outputs or OUTPUTS}
    config = make_config(**features, data={"dialogue": dialogue})
    return build_row_tokenizer(config, tokenizer=tokenizer, context_length=limit)


def prompts_of(
    row_tokenizer: RowTokenizer, messages: list[dict[str, Any]], texts: dict[str, str]
) -> list[PromptExample]:
    """Return the prompts of the outputs of the next turn, continued with the tokens of the answers before them."""
    row = row_schema(row_tokenizer.formatter.config, supervised=False).load({"messages": messages})
    prompts, answered = list[PromptExample](), dict[str, str]()
    text, ids = "", list[int]()
    for name, answer in texts.items():
        prompt = row_tokenizer.encode_next_output(row, answered, key="k", earlier_ids=ids, earlier_text=text)
        assert prompt.error is None
        prompts.append(prompt)
        answered[name] = answer
        text, ids = prompt.text + answer, [*prompt.input_ids, *row_tokenizer.formatter.tokenizer.encode(answer)]
    return prompts


def test_together_a_turn_is_one_object_in_the_order_of_the_file(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, tokenizer, **SPEAKERS)

    first, second = (marked(example, tokenizer) for example in examples(row_tokenizer, ROW))

    whole = '{"state":{"a":1},"action":"ask","reply":"y1"}'
    assert first == f"U: x1 | A: [{whole}</s>]"
    assert second == (f'U: x1 | A: {whole} | U: x2 | A: [{{"state":{SECOND},"action":"tell","reply":"y2"}}</s>]')


def test_a_single_value_is_answered_without_an_object(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(
        make_config,
        tokenizer,
        outputs=OUTPUTS[:1],
        ignore_keys=["action", "content"],
        mode="packed_dialogue",
        **SPEAKERS,
    )

    [packed] = examples(row_tokenizer, ROW)

    assert marked(packed, tokenizer) == f"U: x1 | A: [{FIRST}</s>] | U: x2 | A: [{SECOND}</s>]"


def test_in_sequence_each_output_is_an_answer_to_a_question_with_its_name(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(
        make_config, tokenizer, answers="in_sequence", mode="packed_dialogue", questions={"reply": "say"}, **SPEAKERS
    )

    [packed] = examples(row_tokenizer, ROW)

    assert marked(packed, tokenizer) == (
        f"U: x1 | A: [{FIRST}</s>] | U: action | A: [ask</s>] | U: say | A: [y1</s>]"
        f" | U: x2 | A: [{SECOND}</s>] | U: action | A: [tell</s>] | U: say | A: [y2</s>]"
    )


def test_in_sequence_without_packing_each_output_has_its_own_row(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, tokenizer, answers="in_sequence", **SPEAKERS)
    assert row_tokenizer.expander is not None

    rows = row_tokenizer.expander.expand(ROW, "k")

    assert [key for key, _ in rows] == [f"k#{number}" for number in range(1, 7)]
    assert row_tokenizer.expander.count(ROW) == 6
    turn_1 = f"U: x1 | A: {FIRST} | U: action | A: ask | U: reply | A: y1"
    assert [marked(example, tokenizer) for example in examples(row_tokenizer, ROW)][2:5] == [
        f"U: x1 | A: {FIRST} | U: action | A: ask | U: reply | A: [y1</s>]",
        f"{turn_1} | U: x2 | A: [{SECOND}</s>]",
        f"{turn_1} | U: x2 | A: {SECOND} | U: action | A: [tell</s>]",
    ]


def test_the_last_turn_in_sequence_has_a_row_for_each_output(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, tokenizer, answers="in_sequence", mode="last_turn", **SPEAKERS)

    answers = [marked(example, tokenizer).rpartition("A: ")[2] for example in examples(row_tokenizer, ROW)]

    assert answers == [f"[{SECOND}</s>]", "[tell</s>]", "[y2</s>]"]


@pytest.mark.parametrize("mode", ["packed_dialogue", "squash"])
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_of_a_sequence_have_the_tokens_of_the_training_rows(
    make_config: Make, tokenizer: Any, chat_tokenizer: Any, mode: str, chat: bool
) -> None:
    row_tokenizer = encoder_of(
        make_config, chat_tokenizer if chat else tokenizer, answers="in_sequence", mode=mode, **SPEAKERS
    )
    texts = {"state": SECOND, "action": "tell", "reply": "y2"}

    prompts = prompts_of(row_tokenizer, SAID[:3], texts)

    if mode == "squash":
        rows = [example for example in examples(row_tokenizer, ROW)[3:] if isinstance(example, Example)]
        assert [row.input_ids[: row.spans[0][0]] for row in rows] == [prompt.input_ids for prompt in prompts]
        return
    [packed] = examples(row_tokenizer, ROW)
    assert isinstance(packed, Example)
    starts = [start for start, _ in packed.spans[-3:]]
    assert [packed.input_ids[:start] for start in starts] == [prompt.input_ids for prompt in prompts]


@pytest.mark.parametrize("answers", ["together", "in_sequence"])
def test_a_history_of_generated_answers_equals_one_of_the_same_values(
    make_config: Make, tokenizer: Any, answers: str
) -> None:
    for shown in (None, ["reply"], ["action", "reply"]):
        row_tokenizer = encoder_of(make_config, tokenizer, answers=answers, include_outputs=shown, **SPEAKERS)
        writer = build_turn_writer(row_tokenizer.formatter.config)
        assert writer is not None
        row = row_schema(row_tokenizer.formatter.config, supervised=True).load(ROW)
        answer = writer.answer(
            row["messages"]["messages"][1]["values"] | {"action": "ask", "reply": "y1", "state": {"a": 1}}
        )
        said = {"role": "assistant", "content": "heard", "train": True, "generated": answer}
        given = {"messages": [SAID[0], said, SAID[2]], "labels": [], "train_all": False}
        asked = row_schema(row_tokenizer.formatter.config, supervised=False).load({"messages": SAID[:3]})

        assert row_tokenizer.encode_prompt({"messages": given}, key="k") == row_tokenizer.encode_prompt(asked, key="k")


def test_earlier_turns_show_only_the_outputs_that_the_file_includes(make_config: Make, tokenizer: Any) -> None:
    one = encoder_of(make_config, tokenizer, answers="in_sequence", include_outputs=["reply"], **SPEAKERS)
    two = encoder_of(make_config, tokenizer, include_outputs=["action", "reply"], **SPEAKERS)

    assert marked(examples(one, ROW)[3], tokenizer) == f"U: x1 | A: y1 | U: x2 | A: [{SECOND}</s>]"
    assert marked(examples(two, ROW)[1], tokenizer).startswith('U: x1 | A: {"action":"ask","reply":"y1"} | U: x2')


def test_an_unreadable_answer_is_shown_whole_if_outputs_are_left_out(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, tokenizer, include_outputs=["reply"], **SPEAKERS)
    said = {"role": "assistant", "content": "", "train": True, "generated": "no object"}
    row = {"messages": {"messages": [SAID[0], said, SAID[2]], "labels": [], "train_all": False}}

    assert row_tokenizer.encode_prompt(row, key="k").text == "U: x1 | A: no object | U: x2 | A: "


def test_a_chat_template_renders_each_output_as_a_message(make_config: Make, chat_tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, chat_tokenizer, answers="in_sequence")
    assert row_tokenizer.expander is not None
    assert row_tokenizer.expander.mode == "packed_dialogue"

    [packed] = examples(row_tokenizer, {"messages": SAID[:2]})

    answer = "<|im_start|>assistant\n[{}<|im_end|>]\n"
    assert marked(packed, chat_tokenizer) == (
        turn("user", "x1")
        + answer.format(FIRST)
        + turn("user", "action")
        + answer.format("ask")
        + turn("user", "reply")
        + answer.format("y1")
    )


def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_each_output(
    make_config: Make, chat_tokenizer: Any
) -> None:
    chat_tokenizer.chat_template = NO_THOUGHTS
    row_tokenizer = encoder_of(make_config, chat_tokenizer, answers="in_sequence")
    texts = {"state": SECOND, "action": "tell", "reply": "y2"}

    rows = [example for example in examples(row_tokenizer, ROW) if isinstance(example, Example)]

    assert len(rows) == 6
    prompts = prompts_of(row_tokenizer, SAID[:3], texts)
    assert [row.input_ids[: row.spans[0][0]] for row in rows[3:]] == [prompt.input_ids for prompt in prompts]


def test_a_template_whose_roles_must_alternate_can_answer_in_sequence(make_config: Make, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = ALTERNATING
    row_tokenizer = encoder_of(make_config, chat_tokenizer, answers="in_sequence", mode="packed_dialogue")

    [packed] = examples(row_tokenizer, ROW)

    assert isinstance(packed, Example)
    assert len(packed.spans) == 6


def test_limits_of_the_context_count_turns_and_not_outputs(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, tokenizer, answers="in_sequence", context_turns=1, **SPEAKERS)
    pair = encoder_of(make_config, tokenizer, answers="in_sequence", context_length=2, **SPEAKERS)

    assert marked(examples(row_tokenizer, ROW)[5], tokenizer) == (
        f"U: x2 | A: {SECOND} | U: action | A: tell | U: reply | A: [y2</s>]"
    )
    assert marked(examples(pair, ROW)[3], tokenizer).startswith(f"A: {FIRST} | U: action | A: ask | U: reply | A: y1 |")


def test_for_scores_a_turn_is_a_row_and_for_the_loss_each_output(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, tokenizer, answers="in_sequence", mode="packed_dialogue", **SPEAKERS)
    assert row_tokenizer.expander is not None

    scored, learned = (
        for_scores(row_tokenizer.expander).expand(ROW, "k"),
        for_loss(row_tokenizer.expander).expand(ROW, "k"),
    )

    assert [key for key, _ in scored] == ["k#1", "k#2"]
    row = row_schema(row_tokenizer.formatter.config, supervised=True).load(scored[1][1])
    assert {name: row[name] for name in ("state", "action", "reply")} == {
        "state": {"a": 1, "b": "c"},
        "action": "tell",
        "reply": "y2",
    }
    assert [row["messages"]["output"] for _, row in learned] == ["state", "action", "reply"] * 2


def test_the_right_answer_of_a_simulation_trains_all_outputs_of_its_turn(make_config: Make, tokenizer: Any) -> None:
    label = json.dumps({"state": {"a": 1, "b": "c"}, "action": "tell", "reply": "y2"})
    answer = json.dumps({"state": FIRST, "action": "ask", "reply": "y1"})
    said = {"role": "assistant", "content": "heard", "train": True, "generated": answer}
    row = {"messages": [SAID[0], said, SAID[2]], "labels": [label], "train_all": False}
    packed, squash = (
        encoder_of(make_config, tokenizer, answers="in_sequence", mode=mode, **SPEAKERS)
        for mode in ("packed_dialogue", "squash")
    )

    [whole] = examples(packed, row)
    assert marked(whole, tokenizer) == (
        f"U: x1 | A: {FIRST}</s> | U: action | A: ask</s> | U: reply | A: y1</s>"
        f" | U: x2 | A: [{SECOND}</s>] | U: action | A: [tell</s>] | U: reply | A: [y2</s>]"
    )
    assert [marked(example, tokenizer).rpartition("A: ")[2] for example in examples(squash, row)] == [
        f"[{SECOND}</s>]",
        "[tell</s>]",
        "[y2</s>]",
    ]


def test_a_long_text_is_truncated_where_it_is_learned_and_shown(make_config: Make, tokenizer: Any) -> None:
    limited = OUTPUTS[2] | {"preprocessing": {"max_sequence_length": 1}}
    row_tokenizer = encoder_of(
        make_config,
        tokenizer,
        outputs=[*OUTPUTS[:2], limited],
        answers="in_sequence",
        mode="packed_dialogue",
        **SPEAKERS,
    )

    [packed] = examples(row_tokenizer, ROW)

    assert isinstance(packed, Example)
    assert packed.cut_tokens == 2
    assert "U: reply | A: [y</s>] | U: x2" in marked(packed, tokenizer)


def test_a_prompt_that_leaves_no_room_names_its_length(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(
        make_config, tokenizer, answers="in_sequence", mode="packed_dialogue", limit=12, **SPEAKERS
    )

    [packed] = examples(row_tokenizer, {"messages": SAID[:2]})
    assert isinstance(packed, Example)
    assert packed.cut_tokens > 0
    [short] = examples(
        encoder_of(make_config, tokenizer, answers="in_sequence", mode="packed_dialogue", limit=5, **SPEAKERS),
        {"messages": SAID[:2]},
    )
    assert isinstance(short, RowError)
    assert "leaves no room for an answer within 5" in str(short)


def test_questions_between_outputs_are_counted_in_tokens(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, tokenizer, answers="in_sequence", mode="packed_dialogue", **SPEAKERS)

    first, *others = row_tokenizer.question_tokens(["state", "action", "reply"])

    assert first == 0
    # Of " | U: action | A: " with an end token before it, and at most two more.
    exact = [len(tokenizer.encode(f" | U: {name} | A: ")) + 1 for name in ("action", "reply")]
    assert all(0 <= count - needed <= 2 for count, needed in zip(others, exact, strict=True))
