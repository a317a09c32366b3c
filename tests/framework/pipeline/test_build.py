from pathlib import Path
from typing import Any

import pytest

from partita import DataError, Model, ModelError


def zero_shot(colours: Any, **changes: Any) -> dict[str, Any]:
    """Return the colours configuration without training, with its labels listed."""
    outputs = [
        {"name": "colour", "type": "category", "decoder": {"labels": ["red", "blue", "green"]}},
        {"name": "number", "type": "number"},
    ]
    return colours.config(trainer={"type": "none", "batch_size": 4}, output_features=outputs, **changes)  # type: ignore[no-any-return]


def words_of(model: Model) -> set[str]:
    """Return the words in the vocabulary of the tokenizer, without their space marks."""
    tokenizer = model._backend.pipeline().lm.tokenizer
    return {tokenizer.decode([number]).strip() for number in tokenizer.get_vocab().values()}


def test_a_new_model_needs_no_answers_to_predict(colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    questions = [{"text": row["text"]} for row in colours.rows(30)]
    (tmp_path / "questions.csv").write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in questions))
    model = Model(zero_shot(colours, data={"source": str(tmp_path / "questions.csv")}), quiet=True)
    assert {row["status"] for row in model.predict(questions[:5])} == {"ok"}
    words = words_of(model)
    assert {"balls", "I", "green"} <= words
    assert "colour" not in words, "the answers were not used for the vocabulary"


def test_the_vocabulary_of_a_new_model_includes_the_words_of_its_answers(colours: Any, tmp_path: Path) -> None:
    assert {"balls", "colour", "number"} <= words_of(Model(zero_shot(colours), quiet=True))


def test_evaluation_of_rows_without_answers_reports_the_missing_column(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    questions = [{"text": row["text"]} for row in colours.rows(30)]
    model = Model(zero_shot(colours), quiet=True)
    with pytest.raises(
        DataError, match=r"dataset has no column 'colour', which output colour needs; its columns are text"
    ):
        model.evaluate(questions)
    with pytest.raises(
        DataError, match=r"dataset has no column 'colour', which output colour needs; its columns are text"
    ):
        model.train(questions, run=tmp_path / "run")


@pytest.mark.parametrize("data", ["test rows only", "no data section"])
def test_a_new_model_without_rows_reports_where_to_add_them(colours: Any, tmp_path: Path, data: str) -> None:
    config = zero_shot(colours)
    config["data"] = {"test": config["data"]["source"]} if data == "test rows only" else {}
    with pytest.raises(DataError, match=r"^a new model needs rows for its tokenizer; write data\.source in the file$"):
        Model(config, quiet=True).predict(colours.rows(2))


@pytest.mark.parametrize("key", ["stop_token_ids", "suppress_tokens", "begin_suppress_tokens"])
def test_token_ids_of_another_model_are_refused(colours: Any, key: str) -> None:
    config = zero_shot(colours)
    config["base_model"] |= {"tokenizer": "byte", "vocab_size": 258}
    config["generation"] = {key: [5, 258]}
    with pytest.raises(ModelError) as caught:
        Model(config, quiet=True).predict(colours.rows(2))
    assert str(caught.value) == (
        f"generation.{key}: 258 is not a token of this model, which has 258; write ids below 258"
    )


def test_a_new_model_with_a_tokenizer_of_bytes_needs_no_rows(colours: Any) -> None:
    config = zero_shot(colours)
    del config["data"]
    config["base_model"] |= {"tokenizer": "byte", "vocab_size": 258}
    assert len(Model(config, quiet=True).predict(colours.rows(2))) == 2
