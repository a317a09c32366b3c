import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.formatter import Formatter
from partita.data.formatting.row_tokenizer import Example, RowTokenizer
from partita.tokenizers.load import byte_tokenizer
from partita_schema.errors import ModelError, RowError

Make = Callable[..., Any]
STORIES = Path(__file__).parents[5] / "shared" / "models" / "stories260k"


def encoder_of(config: Any, tokenizer: Any, context_length: int | None = None) -> RowTokenizer:
    return build_row_tokenizer(config, tokenizer=tokenizer, context_length=context_length)


def learned(example: Example, tokenizer: Any) -> str:
    return "".join(tokenizer.decode(example.input_ids[start:end]) for start, end in example.spans)


def test_only_the_answer_and_the_end_are_in_the_loss(make_config: Make, tokenizer: Any) -> None:
    example = encoder_of(make_config(), tokenizer).encode({"question": "why?", "answer": "so"}, key="k")

    assert tokenizer.decode(example.input_ids) == "why?so</s>"
    assert learned(example, tokenizer) == "so</s>"
    assert example.labels == [-100] * 4 + example.input_ids[4:]
    assert example.cut_tokens == 0


def test_all_tokens_are_in_the_loss_on_request(make_config: Make, tokenizer: Any) -> None:
    config = make_config(trainer={"type": "finetune", "completion_only_loss": False})

    example = encoder_of(config, tokenizer).encode({"question": "why?", "answer": "so"}, key="k")

    assert example.spans == ((0, 7),)


@given(question=st.text(min_size=1, max_size=30), answer=st.text(max_size=30), limit=st.integers(1, 90))
def test_a_prompt_has_the_same_ids_in_training_and_prediction(question: str, answer: str, limit: int) -> None:
    row_tokenizer = encoder_of(CONFIG, TOKENIZER, limit)
    row = {"question": question, "answer": answer}

    prompt = row_tokenizer.encode_prompt(row, key="k")
    [example] = row_tokenizer.encode_rows([row], ["k"])

    assert (prompt.error is None) == isinstance(example, Example)
    if isinstance(example, Example):
        start = example.spans[0][0]
        assert example.input_ids[:start] == prompt.input_ids
        assert set(example.labels[:start]) == {-100}
        assert len(example.input_ids) <= limit
        whole = len(answer.encode()) + 1
        assert example.labels[start:] == TOKENIZER.encode(answer + "</s>")[: limit - start]
        assert example.cut_tokens == max(0, start + whole - limit)


def test_a_truncated_answer_has_no_end_token(make_config: Make, tokenizer: Any) -> None:
    outputs = [{"name": "answer", "type": "text", "preprocessing": {"max_sequence_length": 3}}]
    limited = encoder_of(make_config(output_features=outputs), tokenizer)
    short = encoder_of(make_config(preprocessing={"global_max_sequence_length": 6}), tokenizer, 100)

    for row_tokenizer, text, cut in ((limited, "ques?ans", 2), (short, "ques?a", 5)):
        example = row_tokenizer.encode({"question": "ques?", "answer": "answe"}, key="k")
        assert tokenizer.decode(example.input_ids) == text
        assert example.cut_tokens == cut
    assert tokenizer.decode(limited.encode({"question": "q", "answer": "abc"}, key="k").input_ids) == "qabc</s>"


def test_a_truncated_answer_of_a_chat_has_no_end_token_either(make_config: Make, chat_tokenizer: Any) -> None:
    outputs = [{"name": "answer", "type": "text", "preprocessing": {"max_sequence_length": 3}}]
    row_tokenizer = encoder_of(make_config(output_features=outputs), chat_tokenizer)

    cut = row_tokenizer.encode({"question": "q", "answer": "abcd"}, key="k")
    whole = row_tokenizer.encode({"question": "q", "answer": "abc"}, key="k")

    assert (learned(cut, chat_tokenizer), cut.cut_tokens) == ("abc", 1)
    assert (learned(whole, chat_tokenizer), whole.cut_tokens) == ("abc<|im_end|>", 0)


def test_the_loss_ends_with_the_end_of_turn_token(make_config: Make, chat_tokenizer: Any) -> None:
    example = encoder_of(make_config(), chat_tokenizer).encode({"question": "q", "answer": "a"}, key="k")

    [(start, end)] = example.spans
    assert chat_tokenizer.convert_ids_to_tokens(example.input_ids[start:end]) == ["a", "<|im_end|>"]
    assert chat_tokenizer.convert_ids_to_tokens(example.input_ids[end:]) == ["\u010a"]


def test_text_after_the_last_turn_is_dropped_if_it_does_not_fit(make_config: Make, chat_tokenizer: Any) -> None:
    row = {"question": "q", "answer": "a"}
    whole = encoder_of(make_config(), chat_tokenizer).encode(row, key="k")

    short = encoder_of(make_config(), chat_tokenizer, len(whole.input_ids) - 1).encode(row, key="k")

    assert (short.input_ids, short.spans, short.cut_tokens) == (whole.input_ids[:-1], whole.spans, 0)


def test_a_bos_token_precedes_plain_prompts_once_and_never_chats(make_config: Make) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", 1)])
    row = {"question": "q", "answer": "a"}

    plain = encoder_of(make_config(), tokenizer).encode(row, key="k")
    assert tokenizer.convert_ids_to_tokens(plain.input_ids) == ["<s>", "q", "a", "</s>"]
    assert plain.spans == ((2, 4),)
    assert encoder_of(make_config(), tokenizer).encode_prompt(row, key="k").input_ids == plain.input_ids[:2]

    tokenizer.chat_template = (
        "<s>{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    chat = encoder_of(make_config(), tokenizer).encode(row, key="k")
    assert tokenizer.convert_ids_to_tokens(chat.input_ids) == ["<s>", "q", "a", "</s>"]


def test_rows_without_room_for_an_answer_or_without_text_are_refused(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config(), tokenizer, 5)
    room = "the prompt leaves no room for an answer within 5 tokens"

    with pytest.raises(RowError, match=f"^{room}$"):
        row_tokenizer.encode({"question": "five!", "answer": "x"}, key="k")
    assert row_tokenizer.encode_prompt({"question": "five!"}, key="k").error == room
    with pytest.raises(RowError, match=r"^the prompt is empty$"):
        row_tokenizer.encode({"question": "", "answer": "x"}, key="k")
    assert row_tokenizer.encode_prompt({"question": ""}, key="k").error == "the prompt is empty"
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(RowError, match=r"^the answer is empty: there is nothing to learn$"):
        encoder_of(make_config(), endless).encode({"question": "q", "answer": ""}, key="k")


def test_one_bad_row_does_not_affect_its_batch(make_config: Make, tokenizer: Any) -> None:
    questions = ["good", "", "\ud800", "fine"]
    rows = [{"question": question, "answer": "x"} for question in questions]
    row_tokenizer = encoder_of(make_config(), tokenizer)

    found = row_tokenizer.encode_rows(rows, ["a", "b", "c", "d"])

    assert [str(item) if isinstance(item, RowError) else item.key for item in found] == [
        "a",
        "the prompt is empty",
        "not Unicode: half of a surrogate pair",
        "d",
    ]
    prompts = row_tokenizer.encode_prompts(rows, ["a", "b", "c", "d"])
    assert [prompt.error for prompt in prompts] == [
        None,
        "the prompt is empty",
        "not Unicode: half of a surrogate pair",
        None,
    ]


def test_a_chat_template_that_fails_on_one_row_fails_that_row(make_config: Make, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace(
        "{{ message['content'] }}", "{{ message['content'] | replace('b', 'B') }}"
    )
    rows = [{"question": "q", "answer": answer} for answer in ("a", "b", "c")]

    found = encoder_of(make_config(), chat_tokenizer).encode_rows(rows, ["0", "1", "2"])

    assert [isinstance(item, RowError) for item in found] == [False, True, False]


def test_a_pickled_encoder_is_restored_unchanged(make_config: Make, chat_tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config(prompt={"task": "Do it."}), chat_tokenizer, 200)
    row = {"question": "why?", "answer": "so"}

    copy = pickle.loads(pickle.dumps(row_tokenizer))

    assert copy.encode(row, key="k") == row_tokenizer.encode(row, key="k")
    assert copy.fingerprint_inputs() == row_tokenizer.fingerprint_inputs()


def test_the_parts_of_the_fingerprint_show_what_changed(make_config: Make, tokenizer: Any, chat_tokenizer: Any) -> None:
    before = encoder_of(make_config(), tokenizer, 100).fingerprint_inputs()

    def changed(config: Any, tokenizer: Any, context: int) -> list[str]:
        after = encoder_of(config, tokenizer, context).fingerprint_inputs()
        return [name for name in before if before[name] != after[name]]

    assert changed(make_config(), tokenizer, 100) == []
    assert changed(make_config(), tokenizer, 99) == ["token limits"]
    assert changed(make_config(), chat_tokenizer, 100) == ["tokenizer"]
    assert changed(make_config(prompt={"task": "x"}), tokenizer, 100) == ["prompt"]
    inputs = [{"name": "question", "type": "text", "preprocessing": {"lowercase": True}}]
    assert changed(make_config(input_features=inputs), tokenizer, 100) == ["features"]
    everything = {"type": "finetune", "completion_only_loss": False}
    assert changed(make_config(trainer=everything), tokenizer, 100) == ["loss tokens"]


def test_a_length_above_the_context_is_refused(make_config: Make, tokenizer: Any) -> None:
    config = make_config(preprocessing={"global_max_sequence_length": 2048})

    with pytest.raises(
        ModelError, match=r"global_max_sequence_length: 2,048 is above the model's context of 512 tokens"
    ):
        encoder_of(config, tokenizer, 512)


@pytest.mark.skipif(not STORIES.exists(), reason="the shared stories260k model is not next to the repository")
def test_a_real_tokenizer_gives_the_ids_of_the_training_of_its_model(make_config: Make) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    row_tokenizer = encoder_of(make_config(), tokenizer, 512)
    row = {"question": "Once upon a time", "answer": ", there was a cat."}

    assert row_tokenizer.encode_prompt(row, key="k").input_ids == tokenizer("Once upon a time")["input_ids"]
    example = row_tokenizer.encode(row, key="k")
    assert example.input_ids[-1] == tokenizer.eos_token_id
    assert example.labels[-1] == tokenizer.eos_token_id


def config_of_module() -> Any:
    from partita_schema.config import Config

    features = {"input_features": [{"name": "question"}], "output_features": [{"name": "answer", "type": "text"}]}
    return Config.model_validate({"base_model": "unused", **features})


CONFIG, TOKENIZER = config_of_module(), byte_tokenizer()


def test_formatting_needs_no_tokenizer(make_config: Make) -> None:
    assert Formatter(make_config(), tokenizer=None).format({"question": "a", "answer": "b"}).text == "ab"
