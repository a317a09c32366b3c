"""Tests of dialogues as text and tokens: loss tokens, and prompts that match the training text."""

import pickle
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from marshmallow import ValidationError

from partita.data.dialogue import for_scores
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import Example, RowTokenizer
from partita.tokenizers.load import byte_tokenizer
from partita_schema.errors import RowError
from partita_schema.rows import row_schema

Make = Callable[..., Any]
FEATURES = {
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "output_features": [{"name": "reply", "type": "text"}],
}
SAID = ("x1", "y1", "x2", "y2")
ROW = {"messages": [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(SAID)]}


def encoder_of(made: Make, tokenizer: Any, *, limit: int | None = None, **sections: Any) -> RowTokenizer:
    return build_row_tokenizer(made(**(FEATURES | sections)), tokenizer=tokenizer, context_length=limit)


def examples(row_tokenizer: RowTokenizer, row: dict[str, Any], *, scored: bool = False) -> list[Example | RowError]:
    expander = row_tokenizer.expander
    assert expander is not None
    made = (for_scores(expander) if scored else expander).expand(row, "k")
    schema = row_schema(row_tokenizer.formatter.config, supervised=True)
    return row_tokenizer.encode_rows([schema.load(row) for _, row in made], [key for key, _ in made])


def marked(example: Example | RowError, tokenizer: Any) -> str:
    assert isinstance(example, Example), example
    text, done = "", 0
    for start, end in example.spans:
        text += tokenizer.decode(example.input_ids[done:start]) + f"[{tokenizer.decode(example.input_ids[start:end])}]"
        done = end
    return text + str(tokenizer.decode(example.input_ids[done:]))


def asked(row_tokenizer: RowTokenizer, messages: list[dict[str, Any]]) -> list[int]:
    row = row_schema(row_tokenizer.formatter.config, supervised=False).load({"messages": messages})
    prompt = row_tokenizer.encode_prompt(row, key="k")
    assert prompt.error is None
    return prompt.input_ids


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_with_a_chat_template_each_answer_and_its_end_are_in_the_loss(make_config: Make, chat_tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, chat_tokenizer, prompt={"system": "s"})

    [packed] = examples(row_tokenizer, ROW)

    answer = "<|im_start|>assistant\n[{}<|im_end|>]\n"
    assert marked(packed, chat_tokenizer) == (
        turn("system", "s") + turn("user", "x1") + answer.format("y1") + turn("user", "x2") + answer.format("y2")
    )
    rows = [marked(example, chat_tokenizer) for example in examples(row_tokenizer, ROW, scored=True)]
    assert rows == [
        turn("system", "s") + turn("user", "x1") + answer.format("y1"),
        turn("system", "s") + turn("user", "x1") + turn("assistant", "y1") + turn("user", "x2") + answer.format("y2"),
    ]


def test_the_system_message_of_a_dialogue_is_kept(make_config: Make, chat_tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, chat_tokenizer, prompt={"system": "s"})

    ids = asked(row_tokenizer, [{"role": "system", "content": "own"}, *ROW["messages"][:1]])

    assert chat_tokenizer.decode(ids) == turn("system", "own") + turn("user", "x1") + "<|im_start|>assistant\n"


def test_without_a_template_messages_follow_the_name_of_their_speaker(make_config: Make, tokenizer: Any) -> None:
    squash = {"dialogue": {"delimiter": " | ", "speakers": {"user": "U: ", "assistant": "A: "}}}
    packed = {"dialogue": squash["dialogue"] | {"mode": "packed_dialogue"}}

    row_tokenizer = encoder_of(make_config, tokenizer, data=squash)
    assert [marked(example, tokenizer) for example in examples(row_tokenizer, ROW)] == [
        "U: x1 | A: [y1</s>]",
        "U: x1 | A: y1 | U: x2 | A: [y2</s>]",
    ]
    row_tokenizer = encoder_of(make_config, tokenizer, data=packed)
    [whole] = examples(row_tokenizer, ROW)
    assert marked(whole, tokenizer) == "U: x1 | A: [y1</s>] | U: x2 | A: [y2</s>]"
    assert tokenizer.decode(asked(row_tokenizer, ROW["messages"])) == "U: x1 | A: y1</s> | U: x2 | A: "


def test_a_context_is_truncated_in_training_and_prediction(make_config: Make, tokenizer: Any) -> None:
    for dialogue, shown in (
        ({"context_length": 2}, "y1\nx2\n"),
        ({"context_turns": 1}, "x2\n"),
        ({"context_tokens": 4}, "y1\nx2\n"),
        ({"include_labels": False}, "x1\nx2\n"),
    ):
        row_tokenizer = encoder_of(make_config, tokenizer, data={"dialogue": dialogue})
        assert marked(examples(row_tokenizer, ROW)[-1], tokenizer) == shown + "[y2</s>]"
        assert tokenizer.decode(asked(row_tokenizer, ROW["messages"])) == shown


def test_last_turn_has_only_the_last_answer_in_the_loss(make_config: Make, chat_tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, chat_tokenizer, data={"dialogue": {"mode": "last_turn"}})

    [example] = examples(row_tokenizer, ROW)

    assert marked(example, chat_tokenizer).count("[") == 1
    assert marked(example, chat_tokenizer).endswith("[y2<|im_end|>]\n")


def test_an_answer_of_weight_0_is_in_the_text_but_not_in_the_loss(make_config: Make, chat_tokenizer: Any) -> None:
    messages: list[dict[str, Any]] = [dict(message) for message in ROW["messages"]]
    messages[1]["weight"] = 0

    [example] = examples(encoder_of(make_config, chat_tokenizer), {"messages": messages})

    text = marked(example, chat_tokenizer)
    assert turn("assistant", "y1") in text
    assert text.count("[") == 1


MARKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_marks_of_the_template_do_not_put_answers_of_weight_0_and_greetings_into_the_loss(
    make_config: Make, chat_tokenizer: Any
) -> None:
    chat_tokenizer.chat_template = MARKING
    greeting = {"role": "assistant", "content": "hello"}
    said = [greeting, *ROW["messages"], {"role": "user", "content": "x3"}, {"role": "assistant", "content": "y3"}]
    for unlearned in ((), (2,), (4,), (2, 4)):
        row = {"messages": [message | ({"weight": 0} if at in unlearned else {}) for at, message in enumerate(said)]}
        learned = {2, 4, 6} - {*unlearned}
        expected = "".join(
            turn("assistant", f"[{message['content']}<|im_end|>]").replace("]<|im_end|>", "]")
            if at in learned
            else turn(message["role"], message["content"])
            for at, message in enumerate(said)
        )
        for mode in ("packed_dialogue", "squash"):
            made = examples(encoder_of(make_config, chat_tokenizer, data={"dialogue": {"mode": mode}}), row)
            assert sum(marked(example, chat_tokenizer).count("[") for example in made) == len(learned)
            if mode == "packed_dialogue":
                assert marked(made[0], chat_tokenizer) == expected


REWRITING = "{% if message['role'] == 'assistant' and not loop.last %}(old){% endif %}{{ message['content'] }}"


def test_a_template_that_rewrites_earlier_turns_is_refused_by_its_message(
    make_config: Make, chat_tokenizer: Any
) -> None:
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace("{{ message['content'] }}", REWRITING)
    row_tokenizer = encoder_of(make_config, chat_tokenizer, data={"dialogue": {"mode": "packed_dialogue"}})

    [refused] = examples(row_tokenizer, ROW)

    assert str(refused) == (
        "the chat template renders the dialogue up to message 2 differently once more messages follow, so not "
        "all answers can be learned in one row; write data.dialogue: {mode: squash}, or last_turn"
    )
    whole = turn("user", "x1") + turn("assistant", "(old)y1") + turn("user", "x2") + "<|im_start|>assistant\n"
    assert chat_tokenizer.decode(asked(row_tokenizer, ROW["messages"])) == whole
    squash = encoder_of(make_config, chat_tokenizer, data={"dialogue": {"mode": "squash"}})
    assert marked(examples(squash, ROW)[1], chat_tokenizer) == whole + "[y2<|im_end|>]\n"


def test_auto_squashes_if_the_template_rewrites_turns_or_the_context_is_truncated(
    make_config: Make, chat_tokenizer: Any
) -> None:
    def mode(**dialogue: Any) -> str:
        expander = encoder_of(make_config, chat_tokenizer, data={"dialogue": dialogue}).expander
        assert expander is not None
        return expander.mode

    assert mode() == "packed_dialogue"
    assert mode(context_turns=3) == mode(include_labels=False) == mode(labels="all") == "squash"
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace("{{ message['content'] }}", REWRITING)
    assert mode() == "squash"


def test_a_changing_date_in_a_template_counts_as_rewriting(make_config: Make, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = "{{ messages|length }}" + chat_tokenizer.chat_template
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace(
        "{{ messages|length }}", "{% if messages|length > 2 %}late{% endif %}"
    )

    [refused] = examples(encoder_of(make_config, chat_tokenizer, data={"dialogue": {"mode": "packed_dialogue"}}), ROW)

    assert "renders the dialogue up to message 2 differently" in str(refused)


def test_a_dialogue_that_the_template_refuses_is_skipped(make_config: Make, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + chat_tokenizer.chat_template
    )
    row_tokenizer = encoder_of(make_config, chat_tokenizer, data={"dialogue": {"context_length": 2}})

    first, second = examples(row_tokenizer, ROW)

    assert isinstance(first, Example)
    assert str(second) == (
        "roles must alternate: the chat template refuses the dialogue; context_turns cuts between questions"
    )


def test_a_template_without_an_end_gets_the_end_token_after_every_answer(make_config: Make, tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    row_tokenizer = encoder_of(make_config, tokenizer)

    [packed] = examples(row_tokenizer, ROW)

    assert marked(packed, tokenizer) == "u:x1\na:[y1\n</s>]u:x2\na:[y2\n</s>]"
    assert tokenizer.decode(asked(row_tokenizer, ROW["messages"])) == "u:x1\na:y1\n</s>u:x2\na:"


def test_a_truncated_dialogue_ends_with_its_last_loss_token(make_config: Make, tokenizer: Any) -> None:
    packed = {"dialogue": {"mode": "packed_dialogue"}}  # x1 \n [y1 end] \n x2 \n [y2 end]: 3 + 3 + 4 + 3 tokens

    for limit, text, cut in ((12, "x1\n[y1</s>]\nx2\n[y2]", 1), (9, "x1\n[y1</s>]", 7), (5, "x1\n[y1]", 8)):
        [example] = examples(encoder_of(make_config, tokenizer, limit=limit, data=packed), ROW)
        assert marked(example, tokenizer) == text
        assert isinstance(example, Example)
        assert example.cut_tokens == cut
    [refused] = examples(encoder_of(make_config, tokenizer, limit=3, data=packed), ROW)
    assert str(refused) == (
        "the prompt leaves no room for an answer within 3 tokens; data.dialogue: {context_tokens: ...} shows less of it"
    )


def test_an_answer_that_is_too_long_is_truncated_without_an_end(make_config: Make, tokenizer: Any) -> None:
    outputs = [{"name": "reply", "type": "text", "preprocessing": {"max_sequence_length": 2}}]
    row_tokenizer = encoder_of(
        make_config, tokenizer, output_features=outputs, data={"dialogue": {"mode": "packed_dialogue"}}
    )
    row = {
        "messages": [*ROW["messages"][:2], {"role": "user", "content": "z"}, {"role": "assistant", "content": "abc"}]
    }
    row["messages"] += ROW["messages"]

    [example] = examples(row_tokenizer, row)

    assert marked(example, tokenizer) == "x1\n[y1</s>]\nz\n[ab]"
    assert isinstance(example, Example)
    assert example.cut_tokens == 1 + len("\nx1\n" + "y1" + "\nx2\n" + "y2")


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(min_size=1, max_size=6)), min_size=1, max_size=8
)


def stripped(text: str) -> bool:
    return bool(text.strip())


@given(said=MESSAGES, chat=st.booleans())
def test_every_answer_is_in_the_loss_once_with_the_same_tokens_in_any_mode(said: Any, chat: bool) -> None:
    messages = [{"role": role, "content": text} for role, text in said if stripped(text)]
    tokenizer = CHAT if chat else PLAIN
    packed, squash = (encoder_of(make, tokenizer, data={"dialogue": {"mode": mode}}) for mode in MODES)
    schema = row_schema(packed.formatter.config, supervised=True)
    made = packed.expander.expand({"messages": messages}, "k") if packed.expander else []
    try:
        clean = schema.load(made[0][1])
    except ValidationError:
        assert not any(message.get("train") for message in messages)
        return
    [whole] = packed.encode_rows([clean], ["k"])
    rows = examples(squash, {"messages": messages})
    scored = examples(packed, {"messages": messages}, scored=True)

    assert isinstance(whole, Example)
    assert not any(isinstance(row, RowError) for row in rows + scored)
    targets = [row.input_ids[start:end] for row in rows for start, end in row.spans]  # type: ignore[union-attr]
    parts = [token for start, end in whole.spans for token in whole.input_ids[start:end]]
    assert parts == [token for target in targets for token in target]
    # The prompt in prediction is the beginning of the packed training row.
    for row in scored:
        assert isinstance(row, Example)
        [(start, end)] = row.spans
        assert whole.input_ids[:end] == row.input_ids[:end]
        assert set(whole.labels[start:end]) != {-100}
    question = messages[: 1 + max(n for n, m in enumerate(messages) if m["role"] == "assistant")]
    [(start, _)] = scored[-1].spans  # type: ignore[union-attr]
    if messages[-1]["role"] == "assistant" and messages[-2]["role"] != "assistant":
        assert asked(packed, question) == whole.input_ids[:start]


def test_a_dialogue_encoder_can_be_pickled(make_config: Make, chat_tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, chat_tokenizer)

    [example] = examples(pickle.loads(pickle.dumps(row_tokenizer)), ROW)

    assert example == examples(row_tokenizer, ROW)[0]
    assert (
        row_tokenizer.fingerprint_inputs()["dialogue"]
        != encoder_of(make_config, chat_tokenizer, data={"dialogue": {"mode": "squash"}}).fingerprint_inputs()[
            "dialogue"
        ]
    )


MODES = ("packed_dialogue", "squash")
PLAIN = byte_tokenizer()
CHAT = byte_tokenizer()
CHAT.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
CHAT.chat_template = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(**sections: Any) -> Any:
    from partita_schema.config import Config

    return Config.model_validate({"base_model": "unused", "trainer": {"type": "finetune"}} | sections)
