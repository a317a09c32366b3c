from collections.abc import Callable
from typing import Any

import pytest

from partita.data.formatting.base import Segment
from partita.data.formatting.formatter import Formatter
from partita_schema.errors import DataError, ModelError, RowError

Make = Callable[..., Any]
ROW = {"question": "2 + 2?", "answer": "4"}
EXAMPLE = {"question": "1 + 1?", "answer": "2"}
TWO_INPUTS = [{"name": "title", "type": "text"}, {"name": "body", "type": "text"}]


def prompt_of(config: Any, row: dict[str, Any], tokenizer: Any = None) -> str:
    return Formatter(config, tokenizer=tokenizer).format_prompt(row).text


def test_a_single_input_is_its_text_followed_by_the_answer(make_config: Make) -> None:
    shaped = Formatter(make_config(), tokenizer=None).format(ROW)

    assert shaped.segments == (Segment("2 + 2?", False), Segment("4", True))
    assert (shaped.begins, shaped.ends) == (True, True)


def test_several_inputs_are_written_as_lines_with_names(make_config: Make) -> None:
    assert prompt_of(make_config(input_features=TWO_INPUTS), {"title": "A", "body": "b\nc"}) == "title: A\nbody: b\nc\n"


def test_system_task_and_examples_precede_the_sample(make_config: Make) -> None:
    config = make_config(prompt={"system": "Be brief.", "task": "Add.", "examples": [EXAMPLE, EXAMPLE]})

    assert prompt_of(config, ROW) == "Be brief.\n\nAdd.\n\n1 + 1?\n2\n\n1 + 1?\n2\n\n2 + 2?\n"


def test_a_template_is_followed_exactly(make_config: Make) -> None:
    template = "{{T}} {__task__}|{__context__}|{__sample__}|{question}|{hint}: "
    config = make_config(prompt={"template": template, "task": "Add.", "examples": [EXAMPLE | {"hint": "easy"}]})

    assert prompt_of(config, {"question": "{x}", "hint": "none"}) == "{T} Add.|1 + 1?\n2|{x}|{x}|none: "


def test_examples_precede_a_template_without_a_place_for_them(make_config: Make) -> None:
    config = make_config(prompt={"template": "Q: {question}\nA: ", "examples": [EXAMPLE]})

    assert prompt_of(config, ROW) == "Q: 1 + 1?\nA: 2\n\nQ: 2 + 2?\nA: "


@pytest.mark.parametrize(
    ("outputs", "row", "answer"),
    [
        ([{"name": "y", "type": "text"}], {"y": " as it is "}, " as it is "),
        ([{"name": "y", "type": "category"}], {"y": "good"}, "good"),
        ([{"name": "y", "type": "number"}], {"y": 8}, "8"),
        ([{"name": "y", "type": "number"}], {"y": -0.125}, "-0.125"),
        ([{"name": "y", "type": "json"}], {"y": {"b": [1, None], "a": "é"}}, '{"b":[1,null],"a":"é"}'),
        (
            [{"name": "y", "type": "number"}, {"name": "x", "type": "text"}, {"name": "z", "type": "json"}],
            {"x": "a", "y": 1.5, "z": [True]},
            '{"y":1.5,"x":"a","z":[true]}',
        ),
    ],
)
def test_answers_are_written_as_plain_text(outputs: Any, row: dict[str, Any], answer: str, make_config: Make) -> None:
    shaped = Formatter(make_config(output_features=outputs), tokenizer=None).format({"question": "?"} | row)

    assert shaped.segments[-1] == Segment(answer, True)


def test_with_a_chat_template_examples_are_turns_and_the_end_is_in_the_loss(
    make_config: Make, chat_tokenizer: Any
) -> None:
    config = make_config(prompt={"system": "Be brief.", "task": "Add.", "examples": [EXAMPLE]})

    shaped = Formatter(config, tokenizer=chat_tokenizer).format(ROW)

    turn = "<|im_start|>user\nAdd.\n\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompt = (
        "<|im_start|>system\nBe brief.<|im_end|>\n" + turn.format("1 + 1?") + "2<|im_end|>\n" + turn.format("2 + 2?")
    )
    turn_end = (Segment("<|im_end|>", True, joined=True), Segment("\n", False, joined=True))
    assert shaped.segments == (Segment(prompt, False), Segment("4", True), *turn_end)
    assert (shaped.begins, shaped.ends) == (False, False)
    assert Formatter(config, tokenizer=chat_tokenizer).format_prompt(ROW).segments == (Segment(prompt, False),)


def test_chat_can_be_turned_off(make_config: Make, chat_tokenizer: Any) -> None:
    assert prompt_of(make_config(prompt={"chat": False}), ROW, chat_tokenizer) == "2 + 2?"


def test_context_placed_by_the_template_is_not_a_turn(make_config: Make, chat_tokenizer: Any) -> None:
    config = make_config(prompt={"template": "{__context__}\n---\n{question}", "examples": [EXAMPLE]})

    assert prompt_of(config, ROW, chat_tokenizer) == (
        "<|im_start|>user\n1 + 1?\n2\n---\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_of_the_template_before_the_answer_is_in_the_loss(make_config: Make, chat_tokenizer: Any) -> None:
    answer = "{% if message['role'] == 'assistant' %}[begin]{% endif %}{{ message['content'] | trim }}"
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace("{{ message['content'] }}", answer)

    shaped = Formatter(make_config(), tokenizer=chat_tokenizer).format({"question": "a", "answer": " b\n"})

    turn_end = (Segment("<|im_end|>", True, joined=True), Segment("\n", False, joined=True))
    assert shaped.segments[1:] == (Segment("[begin]b", True), *turn_end)


def test_thinking_is_turned_off_in_prompt_and_dialogue(make_config: Make, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template += (
        "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}<none>{% endif %}"
    )
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace(
        "{{ message['content'] }}", "{% if message['role'] == 'assistant' %}<none>{% endif %}{{ message['content'] }}"
    )

    shaped = Formatter(make_config(), tokenizer=chat_tokenizer).format(ROW)

    assert shaped.segments[0].text.endswith("<|im_start|>assistant\n<none>")
    assert shaped.segments[1] == Segment("4", True)


def test_a_template_without_an_end_gets_the_end_token(make_config: Make, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )

    assert Formatter(make_config(), tokenizer=chat_tokenizer).format(ROW).ends


def test_a_template_that_rewrites_earlier_turns_is_refused(make_config: Make, chat_tokenizer: Any) -> None:
    original = chat_tokenizer.chat_template
    chat_tokenizer.chat_template = original + "{% if not add_generation_prompt %}{% endif %}"
    formatter = Formatter(make_config(), tokenizer=chat_tokenizer)
    chat_tokenizer.chat_template = original.replace("{{ message['content'] }}", "{{ messages|length }}")

    with pytest.raises(RowError, match=r"renders the prompt differently if the answer follows"):
        formatter.format(ROW)
    with pytest.raises(
        ModelError, match=r"no answer after the prompt .* cannot be separated from the prompt's; write "
    ):
        Formatter(make_config(), tokenizer=chat_tokenizer)


def test_a_template_that_rewrites_answers_is_refused(make_config: Make, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace(
        "{{ message['content'] }}", "{{ message['content'] | replace('b', 'B') }}"
    )
    formatter = Formatter(make_config(), tokenizer=chat_tokenizer)

    assert formatter.format({"question": "a", "answer": "a"}).segments[1].text == "a"
    with pytest.raises(RowError, match=r"the chat template rewrites the answer 'abc'; write chat: false or another"):
        formatter.format({"question": "a", "answer": "abc"})


def test_a_template_that_refuses_a_system_message_is_reported(make_config: Make, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + chat_tokenizer.chat_template
    )

    Formatter(make_config(), tokenizer=chat_tokenizer)
    with pytest.raises(ModelError, match=r"refuses the messages: no system role; without prompt.system"):
        Formatter(make_config(prompt={"system": "s"}), tokenizer=chat_tokenizer)


def test_chat_without_a_template_is_reported(make_config: Make, tokenizer: Any) -> None:
    with pytest.raises(ModelError, match=r"prompt.chat is true, but the tokenizer of unused has no chat template"):
        Formatter(make_config(prompt={"chat": True}), tokenizer=tokenizer)


def test_a_wrong_few_shot_example_is_reported(make_config: Make) -> None:
    number = [{"name": "answer", "type": "number"}]
    examples = [EXAMPLE, {"question": "a", "answer": "x"}]
    config = make_config(output_features=number, prompt={"examples": examples})
    with pytest.raises(DataError, match=r"^prompt.examples\[1\]: column answer: 'x' is not a finite number$"):
        Formatter(config, tokenizer=None)
    label = [{"name": "answer", "type": "category"}]
    config = make_config(output_features=label, prompt={"examples": [EXAMPLE]})
    with pytest.raises(DataError, match=r"^prompt.examples\[0\]: answer is '2', none of the labels a, b$"):
        Formatter(config, tokenizer=None, labels={"answer": ("a", "b")})


def test_inputs_are_truncated_at_whole_tokens_and_truncations_are_counted(make_config: Make, tokenizer: Any) -> None:
    inputs = [{"name": "question", "type": "text", "preprocessing": {"max_sequence_length": 5}}]
    formatter = Formatter(make_config(input_features=inputs), tokenizer=tokenizer)

    shaped = formatter.format({"question": "ab\u20accdef", "answer": "x"})  # the euro sign is three bytes

    assert (shaped.segments[0].text, shaped.cut_tokens) == ("ab\u20ac", 4)
    assert formatter.format({"question": "abcde", "answer": "x"}).cut_tokens == 0


@pytest.mark.parametrize("template", [None, "{question} = "])
def test_inputs_of_examples_are_truncated_like_those_of_rows(
    make_config: Make, tokenizer: Any, template: str | None
) -> None:
    inputs = [{"name": "question", "type": "text", "preprocessing": {"max_sequence_length": 5}}]
    examples = {"examples": [{"question": "1234567", "answer": "1234567"}], "template": template}
    formatter = Formatter(make_config(input_features=inputs, prompt=examples), tokenizer=tokenizer)

    shaped = formatter.format({"question": "7654321", "answer": "x"})

    between = "\n" if template is None else " = "
    assert shaped.segments[0].text == f"12345{between}1234567\n\n76543{between}"
    assert shaped.cut_tokens == 2
