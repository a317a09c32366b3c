"""Tests of pairs of answers and of labelled answers as tokens."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import Example, RowTokenizer
from partita.tokenizers.load import byte_tokenizer
from partita_schema.config import Config
from partita_schema.errors import RowError
from partita_schema.load import load_config
from partita_schema.rows import check_rows, row_schema

PAIR = {"name": "answer", "type": "preference"}
TEXT = {"name": "answer", "type": "text"}
QUESTION = [{"name": "question", "type": "text"}]
DIALOGUE = [{"name": "messages", "type": "dialogue"}]
TOKENIZER = byte_tokenizer()
ROW = {"question": "why?", "chosen": "so", "rejected": "no"}


def config_of(output: dict[str, Any] = PAIR, inputs: Any = QUESTION, **sections: Any) -> Config:
    trainer = {"preference": "preference", "text": "kto" if "label" in output else "finetune"}[output["type"]]
    given = {"base_model": "m", "input_features": inputs, "output_features": [output], "trainer": {"type": trainer}}
    return load_config(given | sections).config


def encoder_of(config: Config, tokenizer: Any = TOKENIZER, context_length: int | None = None) -> RowTokenizer:
    return build_row_tokenizer(config, tokenizer=tokenizer, context_length=context_length)


def encoded(config: Config, row: dict[str, Any], tokenizer: Any = TOKENIZER, **options: Any) -> Example | str:
    """Return a row as tokens, or the reason why it cannot be used."""
    checked = check_rows(row_schema(config, supervised=True), [row])
    if checked.bad:
        [reason] = checked.bad[0]
        return reason
    [example] = encoder_of(config, tokenizer, **options).encode_rows([checked.clean[0]], ["k"])
    return str(example) if isinstance(example, RowError) else example


def pair_of(config: Config, row: dict[str, Any], tokenizer: Any = TOKENIZER, **options: Any) -> Example:
    example = encoded(config, row, tokenizer, **options)
    assert isinstance(example, Example), example
    return example


def branches(example: Example) -> tuple[list[int], list[int]]:
    """Return the prompt with each of its answers."""
    (start, middle), (end_of_first, end) = example.spans
    assert middle == end_of_first
    assert end == len(example.input_ids)
    ids = example.input_ids
    return ids[:middle], ids[:start] + ids[middle:]


def test_a_pair_is_the_prompt_and_both_answers_with_their_ends() -> None:
    example = pair_of(config_of(), ROW)

    assert TOKENIZER.decode(example.input_ids) == "why?so</s>no</s>"
    assert [TOKENIZER.decode(ids) for ids in branches(example)] == ["why?so</s>", "why?no</s>"]
    assert example.spans == ((4, 7), (7, 10))
    assert example.branched
    assert example.cut_tokens == 0


def fine_tuned(row: dict[str, Any], column: str, **options: Any) -> Example:
    return pair_of(config_of(TEXT | {"column": column}), row, **options)


@given(
    question=st.text(min_size=1, max_size=20).filter(str.strip),
    answers=st.lists(st.text(min_size=1, max_size=20).filter(str.strip), min_size=2, max_size=2, unique=True),
    limit=st.integers(1, 90),
)
def test_each_branch_has_the_tokens_of_fine_tuning_on_its_answer(question: str, answers: list[str], limit: int) -> None:
    row = {"question": question, "chosen": answers[0], "rejected": answers[1]}
    example = encoded(config_of(), row, context_length=limit)
    alone = [
        encoded(config_of(TEXT | {"column": column}), row, context_length=limit) for column in ("chosen", "rejected")
    ]

    if isinstance(example, Example):
        assert [list(ids) for ids in branches(example)] == [one.input_ids for one in alone]  # type: ignore[union-attr]
        assert example.cut_tokens == sum(one.cut_tokens for one in alone)  # type: ignore[union-attr]
    else:
        same = [one.input_ids if isinstance(one, Example) else one for one in alone]
        assert same[0] == same[1]


def test_each_branch_of_a_chat_has_the_tokens_of_fine_tuning(chat_tokenizer: Any) -> None:
    rows = [ROW, ROW | {"rejected": "so on"}]
    for row in rows:
        example = pair_of(config_of(), row, chat_tokenizer)
        alone = [fine_tuned(row, column, tokenizer=chat_tokenizer) for column in ("chosen", "rejected")]

        for ids, one in zip(branches(example), alone, strict=True):
            assert ids == one.input_ids[: one.spans[-1][1]]
            assert chat_tokenizer.decode(ids).endswith("<|im_end|>")
            assert chat_tokenizer.decode(one.input_ids[one.spans[-1][1] :]) == "\n"  # nothing learns from it
        assert example.spans[0][0] == alone[0].spans[0][0]


def test_answers_are_cut_to_the_limit_of_the_feature_without_their_end() -> None:
    limited = PAIR | {"preprocessing": {"max_sequence_length": 3}}
    example = pair_of(config_of(limited), ROW | {"rejected": "nothing"})

    assert [TOKENIZER.decode(ids) for ids in branches(example)] == ["why?so</s>", "why?not"]
    assert example.cut_tokens == 4


def test_cut_inputs_are_counted_once() -> None:
    inputs = [{"name": "question", "type": "text", "preprocessing": {"max_sequence_length": 2}}]
    limited = PAIR | {"preprocessing": {"max_sequence_length": 1}}
    example = pair_of(config_of(limited, inputs), ROW)

    assert [TOKENIZER.decode(ids) for ids in branches(example)] == ["whs", "whn"]
    assert example.cut_tokens == 2 + 1 + 1


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        (ROW | {"rejected": "so"}, {}, "the answers in the columns chosen and rejected are equal"),
        (
            ROW | {"rejected": "so on"},
            {"context_length": 6},
            (
                "the answers in the columns chosen and rejected are equal after 5 tokens beyond the length limits are "
                "cut off"
            ),
        ),
        (ROW, {"context_length": 4}, "the prompt leaves no room for an answer within 4 tokens"),
        (ROW | {"rejected": " "}, {}, "column rejected is missing or empty"),
        (ROW | {"chosen": None}, {}, "column chosen is missing or empty"),
        (ROW | {"rejected": "\ud800"}, {}, "column rejected: not Unicode: half of a surrogate pair"),
        (ROW | {"rejected": ["a"]}, {}, "column rejected: ['a'] is not text"),
    ],
)
def test_a_pair_that_cannot_be_compared_is_refused(row: dict[str, Any], options: Any, reason: str) -> None:
    assert encoded(config_of(), row, **options) == reason


def test_answers_that_differ_only_in_spaces_which_a_template_strips_are_equal(chat_tokenizer: Any) -> None:
    row = ROW | {"rejected": "so \n"}
    assert isinstance(encoded(config_of(), row, chat_tokenizer), Example)  # learned and generated as written
    template = chat_tokenizer.chat_template
    chat_tokenizer.chat_template = template.replace("message['content']", "message['content'] | trim")
    assert chat_tokenizer.chat_template != template
    assert encoded(config_of(), row, chat_tokenizer) == "the answers in the columns chosen and rejected are equal"


def test_an_empty_prompt_is_refused() -> None:
    row = {"question": "", "chosen": "so", "rejected": "no"}
    filled = [QUESTION[0] | {"preprocessing": {"missing_value_strategy": "fill_with_const"}}]

    assert encoded(config_of(inputs=filled), row) == "the prompt is empty"


def test_empty_answers_are_filled_on_request() -> None:
    filled = PAIR | {"preprocessing": {"missing_value_strategy": "fill_with_const", "fill_value": "?"}}
    example = pair_of(config_of(filled), ROW | {"rejected": None})

    assert TOKENIZER.decode(example.input_ids) == "why?so</s>?</s>"


def test_columns_and_lower_case_are_those_of_the_file() -> None:
    output = PAIR | {"chosen": "good", "rejected": "bad", "preprocessing": {"lowercase": True}}
    example = pair_of(config_of(output), {"question": "why?", "good": "So", "bad": "NO"})

    assert TOKENIZER.decode(example.input_ids) == "why?so</s>no</s>"


def test_an_output_may_have_the_name_of_a_column() -> None:
    output = PAIR | {"name": "rejected"}
    example = pair_of(config_of(output), ROW)

    assert TOKENIZER.decode(example.input_ids) == "why?so</s>no</s>"


def test_worked_examples_have_one_answer() -> None:
    config = config_of(prompt={"examples": [{"question": "1?", "answer": "2"}]})
    example = pair_of(config, ROW)

    assert TOKENIZER.decode(example.input_ids) == "1?\n2\n\nwhy?\nso</s>no</s>"


def test_prediction_needs_no_answers_and_reads_the_prompt_of_training() -> None:
    config = config_of()
    row = row_schema(config, supervised=False).load({"question": "why?"})
    prompt = encoder_of(config).encode_prompt(row, key="k")

    assert prompt.input_ids == pair_of(config, ROW).input_ids[:4]


def test_generated_answers_are_compared_with_the_chosen_one() -> None:
    config = config_of()
    row = row_schema(config, supervised=True).load(ROW)

    assert encoder_of(config).reference(row, key="k")["answer"] == "so"


def test_the_tokenizer_of_pairs_can_be_pickled() -> None:
    row_tokenizer = pickle.loads(pickle.dumps(encoder_of(config_of())))
    row = row_schema(config_of(), supervised=True).load(ROW)

    assert row_tokenizer.encode(row, key="k") == pair_of(config_of(), ROW)


class TestWithoutInputs:
    """Without inputs, the common beginning of both texts is the prompt."""

    def test_the_prompt_is_the_common_beginning_in_tokens(self) -> None:
        row = {"chosen": "Human: why?\nAI: so", "rejected": "Human: why?\nAI: no, no"}
        example = pair_of(config_of(inputs=[]), row)

        assert TOKENIZER.decode(example.input_ids) == "Human: why?\nAI: so</s>no, no</s>"
        assert example.spans[0][0] == len("Human: why?\nAI: ")

    def test_each_branch_has_the_tokens_of_its_text(self) -> None:
        row = {"chosen": "abc", "rejected": "abcd"}
        example = pair_of(config_of(inputs=[]), row)

        assert [TOKENIZER.decode(ids) for ids in branches(example)] == ["abc</s>", "abcd</s>"]

    def test_a_token_that_is_only_partly_common_belongs_to_the_answers(self) -> None:
        tokenizer = word_tokenizer()
        example = pair_of(config_of(inputs=[]), {"chosen": "one two three", "rejected": "one twofold three"}, tokenizer)

        assert tokenizer.convert_ids_to_tokens(example.input_ids[: example.spans[0][0]]) == ["one"]

    @pytest.mark.parametrize(
        ("chosen", "rejected", "options", "reason"),
        [
            (
                "so",
                "no",
                {},
                (
                    "the texts in the columns chosen and rejected have no common beginning, which would be the prompt; "
                    "name the columns of the prompt in input_features"
                ),
            ),
            (
                "abcde",
                "abcdefgh",
                {"context_length": 5},
                (
                    "the answers in the columns chosen and rejected are equal after 5 tokens beyond the length limits "
                    "are cut off"
                ),
            ),
        ],
    )
    def test_texts_without_a_prompt_or_an_answer_are_refused(
        self, chosen: str, rejected: str, options: Any, reason: str
    ) -> None:
        assert encoded(config_of(inputs=[]), {"chosen": chosen, "rejected": rejected}, **options) == reason

    def test_an_answer_that_is_all_common_is_refused(self) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = None

        assert encoded(config_of(inputs=[]), {"chosen": "abc", "rejected": "ab"}, tokenizer) == (
            "column rejected: nothing of the answer is left after the common beginning"
        )

    @pytest.mark.parametrize(("trainer", "prompt"), [("preference", ["one", "two"]), ("reward", ["one"])])
    def test_a_score_is_not_read_in_the_prompt_if_the_end_token_is_the_pad_token(
        self, trainer: str, prompt: list[str]
    ) -> None:
        tokenizer = word_tokenizer()
        config = config_of(inputs=[], trainer={"type": trainer})
        example = pair_of(config, {"chosen": "one two", "rejected": "one two three"}, tokenizer)

        assert tokenizer.convert_ids_to_tokens(example.input_ids[: example.spans[0][0]]) == prompt
        assert [tokenizer.decode(ids) for ids in branches(example)] == ["one two </s>", "one two three </s>"]

    def test_a_beginning_token_alone_is_no_prompt(self) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.bos_token = "</s>"
        row_tokenizer = encoder_of(config_of(inputs=[]), tokenizer)
        object.__setattr__(row_tokenizer, "beginning", (tokenizer.bos_token_id,))
        row = row_schema(config_of(inputs=[]), supervised=True).load({"chosen": "so", "rejected": "no"})

        [error] = row_tokenizer.encode_rows([row], ["k"])
        assert "have no common beginning" in str(error)


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "one", "two", "three", "twofold"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", pad_token="</s>")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


SYSTEM = {"role": "system", "content": "s"}
EARLIER = [user("hi"), said("hello"), user("why?")]


class TestDialogues:
    """Pairs of dialogues in the layouts of preference datasets."""

    @pytest.mark.parametrize(
        "row",
        [
            {"messages": EARLIER, "chosen": "so", "rejected": "no"},
            {"messages": EARLIER, "chosen": said("so"), "rejected": said("no")},
            {"messages": EARLIER, "chosen": [said("so")], "rejected": [said("no")]},
            {"prompt": EARLIER, "chosen": [said("so")], "rejected": [said("no")]},
            {"chosen": [*EARLIER, said("so")], "rejected": [*EARLIER, said("no")]},
            {"prompt": "hi", "chosen": [*EARLIER, said("so")], "rejected": [*EARLIER, said("no")]},
            {
                "prompt": "hi",
                "messages": [*EARLIER, said("so")],
                "chosen": [*EARLIER, said("so")],
                "rejected": [*EARLIER, said("no")],
                "score_chosen": 8.5,
            },
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello"},
                    {"from": "human", "value": "why?"},
                ],
                "chosen": {"from": "gpt", "value": "so"},
                "rejected": {"from": "gpt", "value": "no"},
            },
            {"instruction": "why?", "history": [["hi", "hello"]], "chosen": "so", "rejected": "no", "output": ""},
        ],
        ids=[
            "text",
            "message",
            "list",
            "prompt list",
            "whole",
            "prompt repeated",
            "ultrafeedback",
            "sharegpt",
            "alpaca",
        ],
    )
    def test_the_layouts_of_preference_datasets_give_the_same_tokens(
        self, row: dict[str, Any], chat_tokenizer: Any
    ) -> None:
        example = pair_of(config_of(inputs=DIALOGUE), row, chat_tokenizer)
        chosen = {"messages": [*EARLIER, said("so", weight=1)]}
        chosen["messages"][1] = said("hello", weight=0)
        rejected = {"messages": [*chosen["messages"][:-1], said("no")]}
        single = config_of(TEXT, DIALOGUE, data={"dialogue": {"mode": "last_turn"}})

        for ids, alone in zip(branches(example), (chosen, rejected), strict=True):
            one = pair_of(single, alone, chat_tokenizer)
            assert ids == one.input_ids[: one.spans[-1][1]]

    def test_a_plain_dialogue_has_the_tokens_of_fine_tuning(self) -> None:
        row = {"chosen": [*EARLIER, said("so")], "rejected": [*EARLIER, said("no")]}
        example = pair_of(config_of(inputs=DIALOGUE), row)

        assert TOKENIZER.decode(example.input_ids) == "hi\nhello\nwhy?\nso</s>no</s>"

    def test_the_history_can_be_limited(self) -> None:
        row = {"chosen": [*EARLIER, said("so")], "rejected": [*EARLIER, said("no")]}
        example = pair_of(config_of(inputs=DIALOGUE, data={"dialogue": {"context_turns": 1}}), row)

        assert TOKENIZER.decode(example.input_ids) == "why?\nso</s>no</s>"

    def test_other_column_names_are_read(self) -> None:
        output = PAIR | {"chosen": "good", "rejected": "bad"}
        config = config_of(output, DIALOGUE, data={"dialogue": {"columns": {"instruction": "question"}}})
        example = pair_of(config, {"question": "why?", "good": "so", "bad": "no"})

        assert TOKENIZER.decode(example.input_ids) == "why?\nso</s>no</s>"

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            (
                {"chosen": [*EARLIER, said("so")], "rejected": [*EARLIER, said("so")]},
                "the answers in the columns chosen and rejected are equal",
            ),
            (
                {"chosen": [*EARLIER, said("so")], "rejected": [user("hi"), said("oh"), user("why?"), said("no")]},
                (
                    "the dialogues in the columns chosen and rejected differ from message 2 on, and only their last "
                    "messages may differ; end both after that message"
                ),
            ),
            (
                {"chosen": EARLIER, "rejected": [*EARLIER, said("no")]},
                "column chosen ends with a message of the user, not with an answer",
            ),
            (
                {"prompt": "what?", "chosen": [*EARLIER, said("so")], "rejected": [*EARLIER, said("no")]},
                "column chosen is a dialogue that does not begin with the prompt; write the answer alone",
            ),
            (
                {"chosen": "so", "rejected": "no"},
                (
                    "column chosen is a text without a prompt; write the column of the prompt at the input, or remove "
                    "input_features if both texts begin with it"
                ),
            ),
            (
                {"messages": [user("hi"), said("hello")], "chosen": said("so"), "rejected": said("no")},
                "column chosen is an answer after an answer; write a prompt that ends with a question",
            ),
            (
                {"system": "other", "prompt": [SYSTEM, user("hi")], "chosen": "so", "rejected": "no"},
                (
                    "column system is 'other', and the messages have the system message 's'; write one of them, or "
                    "data.dialogue: {ignore_keys: [system]} to leave that out of all rows"
                ),
            ),
            ({"prompt": "hi", "chosen": "so"}, "column rejected is missing or empty"),
            ({"prompt": "hi", "chosen": "so", "rejected": ""}, "column rejected is missing or empty"),
            (
                {"prompt": "hi", "chosen": "so", "rejected": [{"role": "wizard", "content": "no"}]},
                "column rejected: message 1: the role is 'wizard'; write one of system, user, assistant, tool",
            ),
            (
                {"prompt": "hi", "chosen": "so", "rejected": "no", "images": ["a.png"]},
                (
                    "column images holds images, which are not read; data.dialogue: {ignore_keys: [images]} to leave "
                    "that out of all rows"
                ),
            ),
        ],
    )
    def test_dialogues_that_cannot_be_compared_are_refused(self, row: dict[str, Any], reason: str) -> None:
        assert encoded(config_of(inputs=DIALOGUE), row) == f"column messages: {reason}"

    @pytest.mark.parametrize(
        "row",
        [
            {"prompt": "why?", "chosen": "so", "rejected": "no"},
            {"prompt": [user("why?")], "chosen": [said("so")], "rejected": [said("no")]},
            {"messages": [user("why?")], "chosen": "so", "rejected": "no"},
            {"chosen": [user("why?"), said("so")], "rejected": [user("why?"), said("no")]},
            {"conversations": [{"from": "human", "value": "why?"}], "chosen": "so", "rejected": "no"},
            {"instruction": "why?", "chosen": "so", "rejected": "no"},
            {"instruction": "why?", "chosen": [user("why?"), said("so")], "rejected": "no"},
            {"prompt": "why?", "chosen": [SYSTEM, user("why?"), said("so")], "rejected": "no"},
        ],
        ids=["texts", "messages", "list", "whole", "sharegpt", "alpaca", "whole and text", "repeated"],
    )
    def test_the_column_system_is_the_system_message(self, row: dict[str, Any]) -> None:
        columns = {"dialogue": {"columns": {"prompt": "question"}}}
        renamed = {"question" if name == "prompt" else name: value for name, value in row.items()}
        for config, written in (
            (config_of(inputs=DIALOGUE), row),
            (config_of(inputs=DIALOGUE, data=columns), renamed),
            (config_of(PAIR | {"head": "linear"}, inputs=DIALOGUE, trainer={"type": "reward"}), row),
        ):
            example = pair_of(config, written | {"system": "s"})
            assert [TOKENIZER.decode(ids) for ids in branches(example)] == ["s\nwhy?\nso</s>", "s\nwhy?\nno</s>"]

    def test_ignored_columns_are_no_part_of_the_prompt(self) -> None:
        row = {"instruction": "why?", "input": "i", "system": "s", "history": [["a", "b"]], "chosen": "so"}
        config = config_of(inputs=DIALOGUE, data={"dialogue": {"ignore_keys": ["input", "system", "history"]}})

        [chosen, _] = branches(pair_of(config, row | {"rejected": "no"}))

        assert TOKENIZER.decode(chosen) == "why?\nso</s>"

    def test_prediction_reads_the_dialogue_up_to_the_answers(self) -> None:
        config = config_of(inputs=DIALOGUE)
        schema = row_schema(config, supervised=False)
        rows = [
            {"chosen": [*EARLIER, said("so")], "rejected": [*EARLIER, said("no")]},
            {"prompt": EARLIER},
            {"messages": EARLIER, "chosen": "so", "rejected": "no"},
        ]
        prompts = [encoder_of(config).encode_prompt(schema.load(row), key="k") for row in rows]

        assert {TOKENIZER.decode(prompt.input_ids) for prompt in prompts} == {"hi\nhello\nwhy?\n"}

    def test_generated_answers_are_compared_with_the_chosen_one(self, chat_tokenizer: Any) -> None:
        config = config_of(inputs=DIALOGUE)
        row = row_schema(config, supervised=True).load({"prompt": "why?", "chosen": "so", "rejected": "no"})

        assert row["answer"] == "so"
        assert encoder_of(config, chat_tokenizer).reference(row, key="k")["answer"] == "so"

    def test_a_cleaned_row_is_read_as_it_is(self) -> None:
        config = config_of(inputs=DIALOGUE)
        schema = row_schema(config, supervised=True)
        row = schema.load({"prompt": "why?", "chosen": "so", "rejected": "no"})

        assert schema.load(row) == row
        assert schema.load(row["messages"]) == row

    def test_one_answer_may_have_reasoning_and_the_other_not(self, chat_tokenizer: Any) -> None:
        chat_tokenizer.chat_template = THINKING
        row = {"prompt": "why?", "chosen": said("so", reasoning_content="hm"), "rejected": "no"}
        example = pair_of(config_of(inputs=DIALOGUE), row, chat_tokenizer)

        assert [chat_tokenizer.decode(ids) for ids in branches(example)] == [
            "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n<think>hm</think>so<|im_end|>",
            "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>",
        ]

    def test_another_prompt_before_one_of_the_answers_is_refused(self, chat_tokenizer: Any) -> None:
        plain = "{{ message['content'] }}<|im_end|>"
        marked = "{% generation %}" + plain + "{% endgeneration %}"
        written = "{% if message['role'] == 'assistant' %}" + marked + "{% else %}" + plain + "{% endif %}"
        chat_tokenizer.chat_template = THINKING.replace(plain, written)
        row = {"prompt": "why?", "chosen": said("so", reasoning_content="hm"), "rejected": "no"}

        assert encoded(config_of(inputs=DIALOGUE), row, chat_tokenizer) == (
            "the chat template writes another prompt before the answer in the column rejected than before that in "
            "chosen"
        )

    def test_marks_around_parts_of_an_answer_are_refused(self, chat_tokenizer: Any) -> None:
        chat_tokenizer.chat_template = (
            "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
            "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'][:1] }}{% endgeneration %}"
            "{{ message['content'][1:2] }}{% generation %}{{ message['content'][2:] }}<|im_end|>{% endgeneration %}"
            "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )

        assert encoded(config_of(), ROW, chat_tokenizer) == (
            "the chat template marks several parts of the answer in the column chosen as generated, and whole answers "
            "are compared; put one {% generation %} around what the assistant says, or remove the marks"
        )


THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message.reasoning_content %}<think>"
    "{{ message.reasoning_content }}</think>{% endif %}{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TestMargins:
    """Margins of pairs, for reward models."""

    @pytest.mark.parametrize("inputs", [QUESTION, DIALOGUE])
    @pytest.mark.parametrize(
        ("margin", "numbers", "value"),
        [
            ("margin", {"margin": 1.5}, 1.5),
            ("margin", {"margin": 0}, 0.0),
            ("margin", {"margin": "2"}, 2.0),
            (["good", "bad"], {"good": 8.5, "bad": 6}, 2.5),
        ],
    )
    def test_a_margin_is_the_value_of_a_pair(
        self, margin: Any, numbers: dict[str, Any], value: float, inputs: Any
    ) -> None:
        row = ROW | {"prompt": "why?"} | numbers
        with_margin = reward_config(PAIR | {"margin": margin}, inputs)
        example = pair_of(with_margin, row)

        assert example.values == (value,)
        assert example.input_ids == pair_of(config_of(inputs=inputs), row).input_ids

    @pytest.mark.parametrize(
        ("margin", "numbers", "reason"),
        [
            ("margin", {"margin": -1}, "column margin: the margin -1 is below 0, so rejected is better than chosen"),
            ("margin", {"margin": "x"}, "column margin: 'x' is not a number"),
            ("margin", {"margin": None}, "column margin is missing or empty"),
            (["good", "bad"], {"good": 6, "bad": 6}, "a tie: the scores in the columns good and bad are both 6"),
            (["good", "bad"], {"good": 5, "bad": 6}, "the score in the column good, 5, is below that in bad, 6"),
        ],
    )
    def test_pairs_without_a_better_answer_are_refused(self, margin: Any, numbers: dict[str, Any], reason: str) -> None:
        assert encoded(reward_config(PAIR | {"margin": margin}, QUESTION), ROW | numbers) == reason


def reward_config(output: dict[str, Any], inputs: Any) -> Config:
    sections = {"base_model": "m", "input_features": inputs, "output_features": [output]}
    return load_config(sections | {"trainer": {"type": "reward"}}).config


class TestLabels:
    """Answers that are good or bad."""

    OUTPUT = TEXT | {"label": "liked"}

    @pytest.mark.parametrize(
        ("label", "value"),
        [
            (True, 1.0),
            (False, 0.0),
            (1, 1.0),
            (0, 0.0),
            (1.0, 1.0),
            ("True", 1.0),
            ("no", 0.0),
            (" Good ", 1.0),
            ("bad", 0.0),
            ("0", 0.0),
        ],
    )
    def test_a_label_is_the_value_of_an_example(self, label: Any, value: float) -> None:
        row = {"question": "why?", "answer": "so", "liked": label}
        example = pair_of(config_of(self.OUTPUT), row)
        alone = pair_of(config_of(TEXT), row)

        assert example.values == (value,)
        assert (example.input_ids, example.spans) == (alone.input_ids, alone.spans)
        assert not example.branched

    @pytest.mark.parametrize("label", ["maybe", 2, -1, 0.5, [1]])
    def test_another_label_is_refused(self, label: Any) -> None:
        row = {"question": "why?", "answer": "so", "liked": label}
        reason = (
            "is not text"
            if isinstance(label, list)
            else ("does not say whether the answer is good; write true or false, 1 or 0, yes or no, or good or bad")
        )

        assert encoded(config_of(self.OUTPUT), row) == f"column liked: {label!r} {reason}"

    def test_a_missing_label_is_refused(self) -> None:
        row = {"question": "why?", "answer": "so", "liked": None}

        assert encoded(config_of(self.OUTPUT), row) == "column liked is missing or empty"

    def test_a_label_may_have_the_name_of_the_output(self) -> None:
        output = {"name": "label", "type": "text", "column": "answer", "label": "label"}
        example = pair_of(config_of(output), {"question": "why?", "answer": "so", "label": 0})

        assert TOKENIZER.decode(example.input_ids) == "why?so</s>"
        assert example.values == (0.0,)

    @pytest.mark.parametrize(
        "row",
        [
            {"messages": [*EARLIER, said("so")], "liked": True},
            {"prompt": EARLIER, "completion": [said("so")], "liked": True},
            {"prompt": EARLIER, "completion": "so", "liked": True},
        ],
    )
    def test_the_last_answer_of_a_dialogue_has_the_label(self, row: dict[str, Any]) -> None:
        example = pair_of(config_of(self.OUTPUT, DIALOGUE), row)

        assert TOKENIZER.decode(example.input_ids) == "hi\nhello\nwhy?\nso</s>"
        assert example.spans == ((14, 17),)
        assert example.values == (1.0,)
