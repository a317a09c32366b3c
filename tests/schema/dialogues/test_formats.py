from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.config import Config
from partita_schema.dialogues.common_form import FormatError
from partita_schema.dialogues.formats import COLUMNS, KEYS_BY_FORMAT, LISTS, READERS
from partita_schema.dialogues.read import has_dialogues, read_dialogue
from partita_schema.rows import check_rows, row_schema
from partita_schema.sections.dialogue import DialogueConfig

EXPECTED = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "so long")]
ROLES = ("user", "assistant")
TEXTS = ["hi", "hello", "bye", "so long"]


def listed(role: str, text: str, roles: tuple[str, str]) -> list[dict[str, Any]]:
    return [{role: roles[place % 2], text: said} for place, said in enumerate(TEXTS)]


def read(row: dict[str, Any], form: str = "auto", column: str = "messages") -> list[tuple[str, str]]:
    return [
        (message["role"], message["content"])
        for message in read_dialogue(row, column=column, format_name=form)["messages"]
    ]


def answers(row: dict[str, Any]) -> list[str]:
    return [m["content"] for m in read_dialogue(row, column="messages")["messages"] if m.get("train")]


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": listed("role", "content", ROLES)}),
    ("sharegpt", {"conversations": listed("from", "value", ("human", "gpt"))}),
    ("turns", {"turns": listed("speaker", "text", ("user", "system"))}),
    ("turns", {"utterances": listed("speaker", "text", ("USER", "ASSISTANT"))}),  # Taskmaster
    ("turns", {"turns": listed("speaker", "utterance", ("USER", "SYSTEM"))}),  # MultiWOZ 2.2
    ("parlai", {"episode": [{"text": "hi", "labels": ["hello"]}, {"text": "bye", "eval_labels": ["so long"]}]}),
    ("alpaca", {"history": [["hi", "hello"]], "instruction": "bye", "input": "", "output": "so long"}),
    ("prompt_completion", {"prompt": listed("role", "content", ROLES)[:3], "completion": "so long"}),
    ("chosen_rejected", {"prompt": listed("role", "content", ROLES)[:3], "chosen": "so long", "rejected": "no"}),
    ("chosen_rejected", {"chosen": listed("role", "content", ROLES), "rejected": listed("role", "content", ROLES)}),
]


@pytest.mark.parametrize(("form", "row"), FORMS)
def test_every_format_is_detected_by_its_columns_and_gives_the_same_dialogue(form: str, row: dict[str, Any]) -> None:
    assert read(row) == EXPECTED
    assert read(row, form) == EXPECTED
    assert answers(row) == ["hello", "so long"]
    assert has_dialogues(list(row), column="messages")
    assert has_dialogues(list(row), column="messages", format_name=form)


def test_formats_with_lists_may_be_in_any_column() -> None:
    for form, row in FORMS[:6]:
        [said] = row.values()
        assert read({"chat": said, "other": 1}, column="chat") == EXPECTED
        assert read({"chat": said}, form, column="chat") == EXPECTED


def test_datasets_of_tasks_have_positions_that_are_not_read_and_annotations_that_must_be_ignored() -> None:
    frames: list[Any] = [{"service": "hotel", "state": {}}]
    said = [
        {"speaker": "USER", "turn_id": str(place), "utterance": text, "frames": frames if place == 2 else []}
        if place % 2 == 0
        else {"speaker": "SYSTEM", "turn_id": str(place), "utterance": text, "frames": []}
        for place, text in enumerate(TEXTS)
    ]
    with pytest.raises(FormatError, match="message 3 has frames, which is not read; write what the model is to see as"):
        read({"turns": said})
    messages = read_dialogue({"turns": said}, column="messages", ignored=["frames"])["messages"]
    assert [(message["role"], message["content"]) for message in messages] == EXPECTED
    assert read({"utterances": [{"index": 0, "speaker": "USER", "text": "hi"}]}) == [("user", "hi")]


CHATML = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in EXPECTED)


@pytest.mark.parametrize("form", ["auto", "chatml"])
def test_text_in_chatml_is_a_dialogue(form: str) -> None:
    assert read({"text": CHATML}, form, column="text") == EXPECTED
    assert read({"text": f"\n{CHATML}<|im_start|>assistant\n"}, form, column="text") == EXPECTED
    assert read({"text": CHATML.removesuffix("<|im_end|>\n")}, form, column="text") == EXPECTED
    called = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<tool_call>{}</tool_call><|im_end|>"
    assert read({"text": called}, form, column="text")[1] == ("assistant", "<tool_call>{}</tool_call>")


def segments(*pairs: tuple[bool, str]) -> dict[str, Any]:
    return {"segments": [{"label": label, "text": text} for label, text in pairs]}


@pytest.mark.parametrize("form", ["auto", "segments"])
def test_segments_are_messages_of_one_text(form: str) -> None:
    row = segments((True, "<s>a "), (False, "b"), (False, " c\n"), (True, "d"), (True, ""), (True, "e</s>"))

    dialogue = read_dialogue(row, column="messages", format_name=form)

    assert dialogue["verbatim"] is True
    assert [(message["role"], message["content"], message.get("train")) for message in dialogue["messages"]] == [
        ("assistant", "<s>a ", True),
        ("user", "b c\n", None),
        ("assistant", "de</s>", True),
    ]


def test_columns_have_the_names_that_the_data_has() -> None:
    for form, (row, columns) in {
        "alpaca": (
            {"question": "Add.", "more": "1 and 2", "answer": "3", "output": 7, "input": "?"},
            {"instruction": "question", "input": "more", "output": "answer"},
        ),
        "prompt_completion": ({"ask": "Add.\n1 and 2", "say": "3"}, {"prompt": "ask", "completion": "say"}),
        "sharegpt": (
            {"chat": [{"from": "human", "value": "Add.\n1 and 2"}, {"from": "gpt", "value": "3"}]},
            {"conversations": "chat"},
        ),
    }.items():
        for name in ("auto", form):
            dialogue = read_dialogue(row, column="messages", format_name=name, columns=columns)
            assert [message["content"] for message in dialogue["messages"]] == ["Add.\n1 and 2", "3"]
    tools = {"messages": listed("role", "content", ROLES), "functions_json": '[{"name": "f"}]'}
    assert read_dialogue(tools, column="messages", columns={"tools": "functions_json"})["tools"]


def test_errors_name_columns_as_the_data_has_them() -> None:
    columns = {"instruction": "question", "output": "answer"}
    with pytest.raises(FormatError, match="column answer: content is not text"):
        read_dialogue({"question": "a", "answer": {"b": 1}}, column="messages", columns=columns)


def test_alpaca_puts_the_input_after_the_instruction() -> None:
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "Be brief."}
    assert read(row) == [("system", "Be brief."), ("user", "Add.\n1 and 2"), ("assistant", "3")]


def test_the_schema_knows_every_format() -> None:
    assert set(get_args(DialogueConfig.model_fields["format"].annotation)) == {"auto", *READERS}


def test_every_format_is_recognized_and_tested() -> None:
    assert {*LISTS, *COLUMNS, "chatml"} == set(READERS)
    assert set(KEYS_BY_FORMAT) == set(LISTS)
    assert {name for name, _ in FORMS} | {"chatml", "segments"} == set(READERS), "the last two have tests of their own"


def test_an_unknown_message_is_reported_with_the_keys_of_every_format() -> None:
    with pytest.raises(FormatError) as caught:
        read_dialogue({"messages": [{"who": "x"}]}, column="messages")

    known = str(caught.value).partition("known are ")[2]
    assert known == ("role and content, from and value, speaker and text or utterance, label and text, text and labels")
    named = set(known.replace(",", "").split())
    assert {key for formats in KEYS_BY_FORMAT.values() for keys in formats for key in keys} <= named


@pytest.mark.parametrize(("form", "row"), [*FORMS, ("chatml", {"messages": CHATML})])
def test_the_column_system_is_the_system_message_in_every_format(form: str, row: dict[str, Any]) -> None:
    for name in ("auto", form):
        assert read(row | {"system": "Be brief."}, name) == [("system", "Be brief."), *EXPECTED]
    for empty in (None, "", " ", float("nan"), []):
        assert read(row | {"system": empty}) == EXPECTED
    renamed = read_dialogue(row | {"instructions": "s"}, column="messages", columns={"system": "instructions"})
    assert renamed["messages"][0] == {"role": "system", "content": "s"}
    ignored = read_dialogue(row | {"system": "s"}, column="messages", ignored=["system"])
    assert [message["content"] for message in ignored["messages"]] == TEXTS


def test_a_column_system_that_is_an_output_is_no_message() -> None:
    row = {"prompt": "Which one?", "system": "heating"}
    messages = read_dialogue(row, column="messages", outputs=["system"])["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["outputs"] == {"system": "heating"}


USER, REPLY = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "Be brief."}


def test_a_system_message_may_be_in_the_column_and_in_the_messages() -> None:
    said = [("system", "Be brief."), ("user", "Q"), ("assistant", "A")]
    for row in (
        {"messages": [SYSTEM, USER, REPLY]},
        {"messages": [{"role": "developer", "content": "Be brief."}, USER, REPLY]},
        {"prompt": "Q", "completion": [SYSTEM, USER, REPLY]},
        {"prompt": [USER], "chosen": [SYSTEM, USER, REPLY]},
    ):
        assert read(row | {"system": "Be brief."}) == said
        assert read(row) == said


WAY_OUT = "data.dialogue: {ignore_keys: [system]} to leave that out of all rows"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": [SYSTEM, USER, REPLY], "system": "Be kind."},
            (
                "column system is 'Be kind.', and the messages have the system message 'Be brief.'; write one of them, "
                f"or {WAY_OUT}"
            ),
        ),
        ({"messages": [USER, REPLY], "system": 3}, f"column system is not text; write a text, or {WAY_OUT}"),
        (
            segments((False, "a"), (True, "b")) | {"system": "Be kind."},
            (
                "column system has no place next to segments, which are the whole text; write it as the first segment, "
                f"or {WAY_OUT}"
            ),
        ),
    ],
    ids=["another", "number", "segments"],
)
def test_a_column_system_that_cannot_be_read_is_refused_or_ignored(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError) as refused:
        read(row)
    assert str(refused.value) == reason
    assert read_dialogue(row, column="messages", ignored=["system"])["messages"]


def test_ignored_columns_of_alpaca_are_not_read() -> None:
    row = {"instruction": "Add.", "input": "?", "output": "3", "system": "s", "history": [["a", "b"]]}
    found = read_dialogue(row, column="messages", ignored=["input", "system", "history"])
    assert [message["content"] for message in found["messages"]] + found["labels"] == ["Add.", "3"]


def test_rows_without_an_answer_are_prompts() -> None:
    for row in ({"instruction": "Add.", "output": ""}, {"prompt": "Add."}, {"episode": [{"text": "Add."}]}):
        assert read(row) == [("user", "Add.")]


def test_content_may_be_text_parts_numbers_or_json() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": 4}]}) == [
        ("user", "ab"),
        ("assistant", "4"),
    ]
    assert read({"messages": '[{"role": "user", "content": "in a CSV cell"}]'}) == [("user", "in a CSV cell")]


def test_answers_without_a_question_or_with_weight_0_are_not_in_the_loss() -> None:
    said = [("system", 1), ("assistant", 1), ("user", 1), ("assistant", 0), ("tool", 1), ("assistant", 1)]
    row = {"messages": [{"role": r, "content": f"{r}{n}", "weight": w} for n, (r, w) in enumerate(said)]}
    assert answers(row) == ["assistant5"]


def message(**keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, keys]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (message(role="user"), "message 2: content is missing"),
        (message(role="user", content=""), "message 2: content is empty"),
        (message(role="user", content={"a": 1}), "message 2: content is not text"),
        (message(content="y"), "message 2 has no role; write one of system, user, assistant, tool"),
        (message(role="narrator", content="y"), "message 2: the role is 'narrator'; write one of system, user"),
        (
            message(role="assistant", content="y", citations=[1]),
            (
                "message 2 has citations, which is not read; write what the model is to see as text in content, or "
                "data.dialogue: {ignore_keys: [citations]} to leave that out of all rows"
            ),
        ),
        (
            message(role="assistant", content="y", mood="z", name="b", refusal=None, audio=[]),
            (
                "message 2 has mood, name, which are not read; write what the model is to see as text in "
                "content, or data.dialogue: {ignore_keys: [mood, name]} to leave that out of all rows"
            ),
        ),
        (message(role="user", content="y", tool_calls=[{"name": "f"}]), "message 2 has tool_calls, which is not read"),
        (message(role="user", content="y", reasoning="z"), "message 2 has reasoning, which is not read"),
        (message(role="user", content="y", labels=["z"]), "message 2 has labels, which is not read"),
        (message(role="assistant", content="y", weight=0.5), "message 2: weight is 0.5; write 0 or 1"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": False}]},
            "message 2 has train, which is not read; write what the model is to see as text in value, or",
        ),
        (
            {"turns": [{"speaker": "user", "text": "a", "state": {"b": 1}}]},
            "message 1 has state, which is not read; write what the model is to see as text in text, or",
        ),
        (
            {"episode": [{"text": "a", "labels": ["b"], "id": "t", "persona": "c"}]},
            "message 1 has persona, which is not read",
        ),
        (
            {"prompt": [{"role": "user", "content": "a", "name": "b"}], "completion": "c"},
            "message 1 has name, which is not read",
        ),
        (
            {"prompt": "a", "completion": [{"role": "assistant", "content": "a", "mood": "b"}]},
            "column completion: message 1 has mood, which is not read",
        ),
        (
            {**message(role="assistant", content="y"), "images": ["cat.png"]},
            (
                "column images holds images, which are not read; data.dialogue: {ignore_keys: [images]} to leave that "
                "out of all rows"
            ),
        ),
        (
            message(role="user", content=[{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "u"}]),
            "message 2: part 2 of content is image_url, and only text is read; leave it out",
        ),
        ({"messages": [{"role": "user", "content": "x"}, "y"]}, "message 2 is not a mapping; write role and content"),
        (
            {"messages": "<s><|im_start|>user\nx"},
            "the text begins with '<s>'; ChatML begins with <|im_start|> and a role",
        ),
        ({"messages": "<|im_start|>user\nx<|im_end|> y"}, "message 1: there is text after <|im_end|>: 'y'"),
        (
            {"messages": "<|im_start|>user\nx<|im_start|>assistant\ny<|im_end|>"},
            "message 1 does not end with <|im_end|>",
        ),
        ({"messages": "<|im_start|>narrator\nx<|im_end|>"}, "message 1: the role is 'narrator'; write one of"),
        ({"messages": "<|im_start|>"}, "the text has no message; ChatML begins with <|im_start|> and a role"),
        (
            {"segments": [{"label": "yes", "text": "a"}]},
            "segment 1: label is 'yes'; write true if the segment is in the loss, else false",
        ),
        ({"segments": [{"label": True, "text": None}]}, "segment 1: text is missing"),
        ({"segments": [{"label": True, "text": "a", "weight": 2}]}, "segment 1 has weight, which is not read"),
        ({"segments": [{"label": True, "text": ""}, 3]}, "segment 2 is not a mapping; write label and text"),
        ({"segments": [{"label": True, "text": ""}]}, "column segments has no text"),
        ({"messages": []}, "column messages is an empty list; write messages with role and content"),
        ({"messages": ["x"]}, "column messages is not a list of messages; write messages with role and content"),
        (
            {"messages": [{"who": "x", "says": "y"}]},
            "column messages: a message has the keys who, says; known are role",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "there is no question: no message has the role user",
        ),
        ({"messages": "hello"}, "column messages is a text; write a list of messages with role and content"),
        ({"messages": None}, "column messages is empty; write a list of messages with role and content"),
        ({"messages": 3}, "column messages is 3; write a list of messages with role and content"),
        ({"a": 1, "b": 2}, "there is no dialogue: neither a list of messages in column messages nor the columns of a"),
        ({"conversations": [{"from": "user", "value": 1}, {"from": "x", "value": "y"}]}, "message 2: the from is 'x'"),
        ({"episode": [{"text": {"a": 1}}]}, "message 1: text is not text"),
        ({"instruction": "a", "output": {"b": 1}}, "column output: content is not text"),
        (
            {"instruction": "a", "history": [["b"]], "output": "c"},
            "history: entry 1 is not a pair of question and answer",
        ),
        ({"prompt": "a", "chosen": [{"role": "assistant"}]}, "column chosen: message 1: content is missing"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "labels": ["c"]}]},
            "message 2: content is none of the labels; write it in labels too, or leave it out",
        ),
    ],
)
def test_an_invalid_dialogue_is_reported_with_reason_and_position(row: dict[str, Any], says: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_dialogue(row, column="messages")
    assert says in str(caught.value)


def test_ignored_keys_and_empty_keys_are_dropped() -> None:
    said = [{"role": "user", "content": "x", "id": 1}, {"role": "assistant", "content": "y", "reasoning_content": "so"}]
    row = {"messages": said, "tools": [{"name": "f"}]}
    options = {"ignore_keys": ["id", "reasoning_content", "tools"]}
    config = Config.model_validate(CONFIG.model_dump(exclude_unset=True) | {"data": {"dialogue": options}})
    empty: list[Any] = [None, "", [], {}, float("nan")]

    result = row_schema(config, supervised=True).load(row)

    assert result["messages"] == {
        "messages": [{"role": "user", "content": "x"}],
        "labels": ["y"],
    }
    for nothing in empty:
        assert read({"messages": [{"role": "user", "content": "x", "tool_calls": nothing}], "tools": nothing})
    assert list(row_schema(CONFIG, supervised=True).validate(row)) == ["messages"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "text", "labels", "user"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["messages", "conversations", "episode", "turns", "prompt", "chosen", "x"]), JSON)
)
def test_any_row_gives_a_dialogue_or_a_reason(row: dict[str, Any]) -> None:
    for supervised in (True, False):
        checked = check_rows(row_schema(CONFIG, supervised=supervised), [row])
        assert len(checked.clean) + len(checked.bad) == 1
        for clean in checked.clean.values():
            assert clean["messages"]["messages"]


CONFIG = Config.model_validate(
    {
        "base_model": "m",
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "reply", "type": "text"}],
    }
)


def test_a_clean_row_has_the_question_and_all_correct_answers() -> None:
    row = {"episode": [{"text": "x1", "labels": ["y1"]}, {"text": "x2", "labels": ["a", "b"]}]}

    supervised = row_schema(CONFIG, supervised=True).load(row)
    asked = row_schema(CONFIG, supervised=False).load(row)

    assert [m["content"] for m in supervised["messages"]["messages"]] == ["x1", "y1", "x2"]
    assert (supervised["messages"]["labels"], supervised["reply"]) == (["a", "b"], "a")
    assert asked == {"messages": {"messages": supervised["messages"]["messages"], "labels": []}}


def test_reasons_include_the_column_and_the_message() -> None:
    checked = check_rows(row_schema(CONFIG, supervised=True), [message(role="user"), message(role="user", content="y")])

    assert checked.bad == {
        0: ("column messages: message 2: content is missing",),
        1: ("column messages: the dialogue has no answer to learn: no assistant message after a question",),
    }


def test_a_dialogue_whose_answers_have_no_weight_has_none_to_learn() -> None:
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0}]}
    checked = check_rows(row_schema(CONFIG, supervised=True), [row])
    assert checked.bad == {0: ("column messages: the dialogue has no answer to learn: all have weight: 0",)}


def test_prompts_and_answers_with_json_text_are_not_parsed() -> None:
    assert read({"prompt": '["a"]', "completion": "[1, 2]"}) == [("user", '["a"]'), ("assistant", "[1, 2]")]
    assert read({"episode": [{"text": "[x]", "labels": '["y"]'}]}) == [("user", "[x]"), ("assistant", '["y"]')]


@pytest.mark.parametrize("column", ["chosen", "completion"])
@pytest.mark.parametrize("prompt", ["Q", [USER]])
@pytest.mark.parametrize("rest", ["A", [REPLY], [USER, REPLY]])
def test_a_prompt_repeated_in_the_answer_is_used_once(column: str, prompt: Any, rest: Any) -> None:
    result = read_dialogue({"prompt": prompt, column: rest}, column="messages")

    assert [(message["role"], message["content"]) for message in result["messages"]] == [
        ("user", "Q"),
        ("assistant", "A"),
    ]


def test_an_answer_that_repeats_another_prompt_is_refused() -> None:
    with pytest.raises(FormatError, match="column chosen is a dialogue that does not begin with the prompt; write the"):
        read_dialogue({"prompt": "other", "chosen": [USER, REPLY]}, column="messages")
