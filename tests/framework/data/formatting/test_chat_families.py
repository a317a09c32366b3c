"""Tests of tool calls, tools and reasoning with the chat templates of ten model families."""

import functools
from typing import Any

import pytest

from partita.data.dialogue import for_scores
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import Example, RowTokenizer
from partita_schema.config import Config
from partita_schema.errors import RowError
from partita_schema.rows import check_rows, row_schema

from .chat_templates import FAMILIES, bars

Row = dict[str, Any]
Messages = list[dict[str, Any]]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},
}
PLAIN: Messages = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]
TOOLS: Messages = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sky": "sunny"}', "name": "get_weather", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is sunny."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome"},
]
REASONING: Messages = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "reasoning_content": "The user asks.", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "reasoning_content": "Easy.", "content": "4"},
]
ROWS: dict[str, Row] = {
    "plain": {"messages": PLAIN},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *PLAIN]},
    "tools": {"messages": TOOLS, "tools": [TOOL]},
    "reasoning": {"messages": REASONING},
}
NO_REASONING = ['the chat template leaves out the reasoning "']
NO_TOOLS = ["the chat template leaves out the tool get_weather; use a model whose template writes it, or data.dialogue"]
NEEDS_THINKING = (
    "the chat template writes the reasoning of an answer only after a prompt that asks for it; write prompt: "
    "{chat_template_kwargs: {enable_thinking: true}}, or data.dialogue: {ignore_keys: [reasoning_content]}"
)
TEXTS = ("Hello", "So long")
ANSWERS = ("It is sunny.", "Welcome")


def ended(texts: tuple[str, ...], end: str, begin: str = "") -> list[str]:
    return [f"{begin}{text}{end}" for text in texts]


EOT, IM_END, EOS, GEMMA, GRANITE = "<|eot_id|>", "<|im_end|>", "</s>", "<end_of_turn>", "<|end_of_text|>"
DEEPSEEK = bars("<@end^of^sentence@>")
FINAL, RETURN = "<|channel|>final<|message|>", "<|return|>"
QWEN_CALL = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
LOSS: dict[str, dict[str, list[str]]] = {
    "llama 3": {
        "plain": ended(TEXTS, EOT),
        "tools": ['{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}' + EOT, *ended(ANSWERS, EOT)],
        "reasoning": NO_REASONING,
    },
    "qwen 2.5": {
        "plain": ended(TEXTS, IM_END),
        "tools": [QWEN_CALL[1:] + IM_END, *ended(ANSWERS, IM_END)],
        "reasoning": NO_REASONING,
    },
    "qwen 3": {
        "plain": ended(TEXTS, IM_END),
        "tools": [QWEN_CALL + IM_END, *ended(ANSWERS, IM_END)],
        "reasoning": [NEEDS_THINKING],
    },
    "mistral": {
        "plain": ended(TEXTS, EOS, " "),
        "tools": [
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}, "id": "abcdefghi"}]</s>',
            *ended(ANSWERS, EOS, " "),
        ],
        "reasoning": NO_REASONING,
    },
    "gemma 3": {
        "plain": ended(TEXTS, GEMMA),
        "tools": ["the chat template leaves out the tool call get_weather; use a model whose template writes it"],
        "reasoning": NO_REASONING,
    },
    "gpt-oss": {
        "plain": ended(TEXTS, RETURN, FINAL),
        "tools": [
            ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 2}<|call|>',
            *ended(ANSWERS, RETURN, FINAL),
        ],
        "reasoning": [
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{FINAL}{answer}{RETURN}"
            for thought, answer in (("The user asks.", "2"), ("Easy.", "4"))
        ],
    },
    "deepseek r1": {"plain": ended(TEXTS, DEEPSEEK), "tools": NO_TOOLS, "reasoning": NO_REASONING},
    "phi 3": {
        "plain": ended(TEXTS, "<|end|>\n<|endoftext|>"),
        "tools": NO_TOOLS,
        "reasoning": NO_REASONING,
    },
    "granite 3": {
        "plain": ended(TEXTS, GRANITE),
        "tools": [
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]' + GRANITE,
            *ended(ANSWERS, GRANITE),
        ],
        "reasoning": NO_REASONING,
    },
    "zephyr": {
        "plain": ended(TEXTS, EOS),
        "tools": ["the chat template leaves out the tool call get_weather"],
        "reasoning": NO_REASONING,
    },
}
"""The texts in the loss of each kind of dialogue, in order, or the beginning of the reason why it has none."""
PACKED = {"llama 3", "qwen 2.5", "gemma 3", "deepseek r1", "granite 3", "zephyr"}
"""Families whose template leaves earlier turns as they are: one row for each dialogue."""


@functools.cache
def tokenizer_of(family: str) -> Any:
    return FAMILIES[family].tokenizer()


def encoder_of(family: str, **sections: Any) -> RowTokenizer:
    config = {
        "base_model": "unused",
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "reply", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
    parsed = Config.model_validate(config | sections)
    return build_row_tokenizer(parsed, tokenizer=tokenizer_of(family), context_length=None)


THINKING = {"prompt": {"chat_template_kwargs": {"enable_thinking": True}}}


def examples(row_tokenizer: RowTokenizer, row: Row) -> list[Example | RowError]:
    assert row_tokenizer.expander is not None
    expanded = row_tokenizer.expander.expand(row, "k")
    checked = check_rows(row_schema(row_tokenizer.formatter.config, supervised=True), [made for _, made in expanded])
    assert not checked.bad
    return row_tokenizer.encode_rows(list(checked.clean.values()), [key for key, _ in expanded])


def loss_texts(row_tokenizer: RowTokenizer, row: Row) -> list[str]:
    """Return the texts in the loss, with the reason of each row that is left out."""
    tokenizer = row_tokenizer.formatter.tokenizer
    return [
        text
        for example in examples(row_tokenizer, row)
        for text in (
            [str(example)]
            if isinstance(example, RowError)
            else [tokenizer.decode(example.input_ids[start:end]) for start, end in example.spans]
        )
    ]


def answers_of(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_tool_calls_and_reasoning_are_in_the_loss_or_the_row_says_why_not(family: str, kind: str) -> None:
    row_tokenizer = encoder_of(family)

    texts = loss_texts(row_tokenizer, ROWS[kind])

    assert row_tokenizer.expander is not None
    assert row_tokenizer.expander.mode == ("packed_dialogue" if family in PACKED else "squash")
    expected = LOSS[family]["plain" if kind == "system" else kind]
    if expected[0].startswith("the chat template"):
        assert texts
        assert all(text.startswith(expected[0]) for text in texts)
    else:
        assert texts == expected


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_ids_of_apply_chat_template_and_start_with_the_prompts_of_prediction(
    family: str, kind: str
) -> None:
    thinks = kind == "reasoning" and family == "qwen 3"
    row_tokenizer, row = encoder_of(family, **(THINKING if thinks else {})), ROWS[kind]
    tokenizer, messages = tokenizer_of(family), row["messages"]
    ends = answers_of(messages)

    good = [example for example in examples(row_tokenizer, row) if isinstance(example, Example)]

    for example, last in zip(good, ends[-1:] if family in PACKED else ends, strict=True) if good else ():
        whole = tokenizer.apply_chat_template(
            messages[: last + 1], tools=row.get("tools"), enable_thinking=thinks, return_dict=True
        )
        assert example.input_ids == whole["input_ids"]
        asked = row_schema(row_tokenizer.formatter.config, supervised=False).load(row | {"messages": messages[:last]})
        assert example.input_ids[: example.spans[-1][0]] == row_tokenizer.encode_prompt(asked, key="k").input_ids
    assert bool(good) == (thinks or not LOSS[family].get(kind, [""])[0].startswith("the chat template"))


def test_with_thinking_the_thought_of_each_answer_is_learned_and_those_of_earlier_turns_are_dropped() -> None:
    row_tokenizer = encoder_of("qwen 3", **THINKING)

    assert loss_texts(row_tokenizer, ROWS["reasoning"]) == [
        "<think>\nThe user asks.\n</think>\n\n2<|im_end|>",
        "<think>\nEasy.\n</think>\n\n4<|im_end|>",
    ]
    assert loss_texts(row_tokenizer, ROWS["plain"])[0] == "<think>\n\n</think>\n\nHello<|im_end|>"
    second = examples(row_tokenizer, ROWS["reasoning"])[1]
    assert isinstance(second, Example)
    assert tokenizer_of("qwen 3").decode(second.input_ids).count("The user asks.") == 0


def test_a_thought_before_a_tool_call_stays_until_the_next_question() -> None:
    messages = [TOOLS[0], TOOLS[1] | {"reasoning_content": "I need the sky."}, *TOOLS[2:4]]
    row_tokenizer = encoder_of("qwen 3", **THINKING)

    first, second = examples(row_tokenizer, {"messages": messages, "tools": [TOOL]})

    assert isinstance(first, Example)
    assert isinstance(second, Example)
    [(start, end)] = first.spans
    thought = "<think>\nI need the sky.\n</think>\n\n" + QWEN_CALL
    assert tokenizer_of("qwen 3").decode(first.input_ids[start:end]) == thought + IM_END
    assert thought in tokenizer_of("qwen 3").decode(second.input_ids[: second.spans[0][0]])


@pytest.mark.parametrize("family", ["qwen 3", "mistral", "gpt-oss"])
def test_sharegpt_with_json_text_gives_the_same_rows_as_messages(family: str) -> None:
    call = '{"name": "get_weather",   "arguments": "{\\"city\\":\\"Paris\\",\\"days\\":2}"}'
    said = [
        ("human", "Weather?"),
        ("function_call", call),
        ("observation", '{"sky": "sunny"}'),
        ("gpt", "It is sunny."),
        ("human", "Thanks"),
        ("gpt", "Welcome"),
    ]
    row = {
        "conversations": [{"from": speaker, "value": text} for speaker, text in said],
        "tools": '[{"name": "get_weather", "description": "Weather of a city.", "parameters": {"type": "object", '
        '"properties": {"city": {"type": "string"}}}}]',
    }
    row_tokenizer = encoder_of(family)

    texts = loss_texts(row_tokenizer, row)

    expected = LOSS[family]["tools"]
    assert texts[1:] == expected[1:]
    if family == "mistral":  # a call without an id has one that its name and arguments give
        assert len(texts[0]) == len(expected[0])
    else:
        assert texts == expected


def test_ids_that_a_template_refuses_are_replaced_in_calls_and_their_results() -> None:
    messages = [
        TOOLS[0],
        TOOLS[1] | {"tool_calls": [CALL | {"id": f"call_{number}"} for number in (1, 2)]},
        *(TOOLS[2] | {"tool_call_id": f"call_{number}"} for number in (1, 2)),
        TOOLS[3],
    ]

    first, second = loss_texts(encoder_of("mistral"), {"messages": messages, "tools": [TOOL]})

    ids = [part[:9] for part in first.split('"id": "')[1:]]
    assert len(set(ids)) == 2
    assert all(each.isalnum() for each in ids)
    example = examples(encoder_of("mistral"), {"messages": messages, "tools": [TOOL]})[1]
    assert isinstance(example, Example)
    text = tokenizer_of("mistral").decode(example.input_ids)
    assert [text.count(each) for each in ids] == [2, 2]
    assert second == " It is sunny.</s>"


def test_arguments_are_text_for_templates_that_concatenate_them() -> None:
    row_tokenizer = encoder_of("deepseek r1", data={"dialogue": {"ignore_keys": ["tools"]}})

    called, *said = loss_texts(row_tokenizer, ROWS["tools"])

    assert '```json\n{"city": "Paris", "days": 2}\n```' in called
    assert called.endswith(DEEPSEEK)
    assert said == ended(ANSWERS, DEEPSEEK)


def test_a_template_that_thinks_in_its_prompt_is_prompted_as_its_dialogues_are_written() -> None:
    asked = {"messages": PLAIN[:1]}
    texts = []
    for sections in ({}, THINKING):
        row_tokenizer = encoder_of("deepseek r1", **sections)
        row = row_schema(row_tokenizer.formatter.config, supervised=False).load(asked)
        texts.append(row_tokenizer.encode_prompt(row, key="k").text)

    assert texts[0].endswith(bars("<@Assistant@>"))
    assert texts[1] == texts[0] + "<think>\n"
    [reason] = loss_texts(encoder_of("deepseek r1", **THINKING), ROWS["plain"])
    assert reason.startswith("the chat template begins to think in the prompt, but writes no thought in the dialogue")


def test_content_that_a_template_drops_next_to_a_tool_call_is_a_reason() -> None:
    messages = [TOOLS[0], TOOLS[1] | {"content": "Let me look."}, *TOOLS[2:]]

    [reason] = loss_texts(encoder_of("llama 3"), {"messages": messages, "tools": [TOOL]})

    assert reason == (
        'the chat template leaves out the answer "Let me look." next to a tool call; use a model whose template writes '
        "it"
    )
    assert loss_texts(encoder_of("qwen 2.5"), {"messages": messages, "tools": [TOOL]})[0] == (
        "Let me look." + QWEN_CALL + IM_END
    )


def test_a_dialogue_that_a_template_refuses_gives_the_words_of_the_template() -> None:
    two = [TOOLS[0], TOOLS[1] | {"tool_calls": [CALL, CALL]}, *TOOLS[2:]]
    asks_twice = [PLAIN[0], PLAIN[2], PLAIN[3]]

    assert loss_texts(encoder_of("llama 3"), {"messages": two, "tools": [TOOL]}) == [
        "This model only supports single tool-calls at once!: the chat template refuses the dialogue"
    ]
    assert loss_texts(encoder_of("gemma 3"), {"messages": asks_twice}) == [
        "Conversation roles must alternate user/assistant/user/assistant/...: the chat template refuses the dialogue"
    ]


def test_a_template_that_writes_the_first_of_several_calls_alone_is_noticed() -> None:
    messages = [TOOLS[0], TOOLS[1] | {"tool_calls": [CALL, CALL]}, *TOOLS[2:4]]

    first, _ = loss_texts(encoder_of("gpt-oss"), {"messages": messages, "tools": [TOOL]})

    assert first.startswith("the chat template leaves out the tool call get_weather")


def test_several_results_of_tools_are_one_turn_where_the_template_makes_them_one() -> None:
    messages = [TOOLS[0], TOOLS[1] | {"tool_calls": [CALL, CALL]}, TOOLS[2], TOOLS[2] | {"content": ""}, TOOLS[3]]

    [example] = examples(encoder_of("qwen 2.5"), {"messages": messages, "tools": [TOOL]})

    assert isinstance(example, Example)
    text = tokenizer_of("qwen 2.5").decode(example.input_ids)
    result = '\n<tool_response>\n{"sky": "sunny"}\n</tool_response>\n<tool_response>\n\n</tool_response><|im_end|>\n'
    assert "<|im_start|>user" + result in text
    assert len(example.spans) == 2


def test_marks_of_generation_decide_the_loss_of_tool_calls_too() -> None:
    tokenizer = FAMILIES["granite 3"].tokenizer()
    call = "{% if calls %}{{ '<|tool_call|>' }}{{ calls | tojson }}{% endif -%}"
    assert call in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- message.content or '' }}" + call,
        "{% if message.role == 'assistant' %}{% generation %}{{- message.content }}{% endgeneration %}"
        "{% else %}{{- message.content }}{% endif %}" + call,
    )
    config = encoder_of("granite 3").formatter.config
    row_tokenizer = build_row_tokenizer(config, tokenizer=tokenizer, context_length=None)
    content = [TOOLS[0], TOOLS[1] | {"content": "Let me look."}]

    assert loss_texts(row_tokenizer, {"messages": content, "tools": [TOOL]}) == ["Let me look."]
    [reason] = loss_texts(row_tokenizer, {"messages": TOOLS[:2], "tools": [TOOL]})
    assert reason.startswith("the chat template marks nothing of the answer ")


def test_variables_reach_the_chat_template() -> None:
    for family, kwargs, shown in (
        ("llama 3", {"date_string": "1 May 2025"}, "Today Date: 1 May 2025"),
        ("gpt-oss", {"reasoning_effort": "high"}, "Reasoning: high"),
        ("granite 3", {"thinking": True}, "You are Granite. Think first."),
    ):
        [example, *_] = examples(encoder_of(family, prompt={"chat_template_kwargs": kwargs}), ROWS["plain"])
        assert isinstance(example, Example)
        assert shown in tokenizer_of(family).decode(example.input_ids)


def test_a_tool_call_is_scored_as_the_text_that_the_template_writes_for_it() -> None:
    row_tokenizer = encoder_of("qwen 2.5")
    row = {"messages": TOOLS[:2], "tools": [TOOL]}
    schema = row_schema(row_tokenizer.formatter.config, supervised=True)

    assert schema.load(row)["reply"] == '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
    assert row_tokenizer.reference(schema.load(row), key="k")["reply"] == QWEN_CALL[1:]
    assert row_tokenizer.reference(schema.load(ROWS["plain"]), key="k")["reply"] == "So long"
    whole = encoder_of("qwen 2.5", trainer={"type": "finetune", "completion_only_loss": False})
    assert whole.reference(schema.load(row), key="k")["reply"] == QWEN_CALL[1:]


def test_an_answer_after_an_empty_thought_is_scored_with_it() -> None:
    for sections, written in (({}, "So long"), (THINKING, "<think>\n\n</think>\n\nSo long")):
        row_tokenizer = encoder_of("qwen 3", **sections)
        [*_, (_, row)] = for_scores(row_tokenizer.expander).expand(ROWS["plain"], "k") if row_tokenizer.expander else []
        clean = row_schema(row_tokenizer.formatter.config, supervised=True).load(row)
        assert row_tokenizer.reference(clean, key="k")["reply"] == written


def test_without_a_chat_template_tools_and_reasoning_are_refused() -> None:
    row_tokenizer = encoder_of("qwen 3", prompt={"chat": False})

    assert loss_texts(row_tokenizer, ROWS["tools"])[-1] == (
        "the dialogue has tools, which only a chat template can write, and none is used; write a base_model with one, "
        "or data.dialogue: {ignore_keys: [tools]}"
    )
    assert "the dialogue has tool_calls, which only" in loss_texts(row_tokenizer, {"messages": TOOLS})[-1]
    assert "the dialogue has reasoning_content, which only" in loss_texts(row_tokenizer, ROWS["reasoning"])[0]
