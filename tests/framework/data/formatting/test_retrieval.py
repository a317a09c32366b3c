import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.data.formatting import retrieval
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.retrieval import build_retriever
from partita.data.rows import Rows
from partita.data.sources.sources import open_rows
from partita_schema.errors import DataError, ModelError

Make = Callable[..., Any]
RANDOM = {"retrieval": {"type": "random", "k": 3}}


def pool(length: int = 12) -> Rows:
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(length)]
    return open_rows([{"question": "", "answer": "bad"}, *rows], folder=Path())


def questions(examples: Sequence[Any]) -> list[str]:
    return [example["question"] for example in examples]


def test_random_examples_depend_only_on_the_row_and_the_seed(make_config: Make) -> None:
    rows = [{}] * 4
    keys = [f"dataset:{n}" for n in (2, 3, 4, 5)]

    def chosen(seed: int, order: slice) -> list[list[str]]:
        found = build_retriever(make_config(prompt=RANDOM, seed=seed), training=pool(), folder=Path())
        assert found is not None
        return [questions(examples) for examples in found.choose(rows, keys[order])][order]

    assert chosen(1, slice(None)) == chosen(1, slice(None, None, -1))
    assert chosen(1, slice(None)) != chosen(2, slice(None))
    assert len({tuple(examples) for examples in chosen(1, slice(None))}) > 1


def test_random_examples_are_valid_rows_and_never_the_row_itself(make_config: Make) -> None:
    rows = pool(5)
    config = make_config(prompt={"retrieval": {"type": "random", "k": 4}})
    retriever = build_retriever(config, training=rows, folder=Path())
    assert retriever is not None

    for index in range(1, 6):
        [examples] = retriever.choose([{}], [rows.key(index)])
        assert sorted(questions(examples)) == [f"q{i}" for i in range(5) if i != index - 1]
    [all_of_them] = retriever.choose([{"question": "new"}], ["elsewhere:1"])
    assert len(set(questions(all_of_them))) == 4


@pytest.mark.parametrize("key", ["mixed/tiny.csv:2", "dataset:4", "dataset:40", "dataset:x", "dataset"])
def test_a_training_row_from_another_source_is_not_its_own_example(make_config: Make, key: str) -> None:
    rows = open_rows([{"question": text, "answer": text.upper()} for text in "abbc"], folder=Path())
    config = make_config(prompt={"retrieval": {"type": "random", "k": 4}})
    retriever = build_retriever(config, training=rows, folder=Path())
    assert retriever is not None

    assert sorted(questions(retriever.choose([{"question": "a", "answer": "A"}], [key])[0])) == ["b", "b", "c"]
    assert sorted(questions(retriever.choose([{"question": "a"}], [key])[0])) == ["b", "b", "c"]
    assert sorted(questions(retriever.choose([{"question": "b", "answer": "B"}], ["dataset:2"])[0])) == ["a", "b", "c"]
    assert sorted(questions(retriever.choose([{"question": "b", "answer": "X"}], ["dataset:2"])[0])) == [*"abbc"]


def test_all_rows_are_examples_if_there_are_too_few(make_config: Make) -> None:
    retriever = build_retriever(make_config(prompt=RANDOM), training=pool(2), folder=Path())
    assert retriever is not None

    assert sorted(questions(retriever.choose([{"question": "new"}], ["x"])[0])) == ["q0", "q1"]


def test_examples_can_come_from_a_file_and_are_in_the_prompt(make_config: Make, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("question,answer\nhow?,so\n")
    config = make_config(prompt={"retrieval": {"type": "random", "k": 1, "dataset": "e.csv"}})

    retriever = build_retriever(config, training=None, folder=tmp_path)
    row_tokenizer = build_row_tokenizer(config, tokenizer=tokenizer, context_length=None, retriever=retriever)

    row = {"question": "why?", "answer": "x"}
    assert row_tokenizer.encode_prompt(row, key="k").text == "how?\nso\n\nwhy?\n"
    assert pickle.loads(pickle.dumps(row_tokenizer)).encode(row, key="k") == row_tokenizer.encode(row, key="k")


class Letters:
    """An embedding model that counts letters."""

    def encode(self, texts: list[str], *, show_progress_bar: bool) -> np.ndarray:
        assert not show_progress_bar
        return np.array([[text.count(letter) for letter in "abc"] for text in texts], dtype=np.float64)


@pytest.mark.parametrize("known", [{}, {"answer": "a1"}])
def test_a_row_under_another_key_is_not_its_own_example(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: dict[str, str]
) -> None:
    monkeypatch.setattr(retrieval, "load_embedder", lambda name: Letters())
    lines = ["question,answer", "aa,a1", "aa,a1", "b,b1", "bb,b2", "aab,a3"]
    (tmp_path / "e.csv").write_text("\n".join(lines))
    row = {"question": "aa", **known}
    for kind, expected in (("random", ["aab", "b", "bb"]), ("semantic", ["b", "bb", "aab"])):
        section = {"type": kind, "k": 3, "dataset": "e.csv"} | ({"model_name": "x"} if kind == "semantic" else {})
        found = build_retriever(make_config(prompt={"retrieval": section}), training=None, folder=tmp_path)
        assert found is not None
        chosen = questions(found.choose([row], ["mixed/e.csv@17:2"])[0])
        assert sorted(chosen) == sorted(expected)


def test_semantic_examples_are_the_nearest_with_the_nearest_last(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "load_embedder", lambda name: Letters())
    texts = ["a", "b", "c", "aab", "abb", "", "aaaa"]
    rows = open_rows([{"question": text, "answer": text} for text in texts], folder=Path())
    config = make_config(prompt={"retrieval": {"type": "semantic", "k": 2}})
    retriever = build_retriever(config, training=rows, folder=Path())
    assert retriever is not None

    near_a, itself, near_b = retriever.choose(
        [{"question": "aaa"}, {"question": "a"}, {"question": "bbba"}], ["elsewhere:1", rows.key(0), "elsewhere:2"]
    )

    assert questions(near_a) == ["aaaa", "a"]
    assert questions(itself) == ["aab", "aaaa"]
    assert questions(near_b) == ["b", "abb"]
    assert retriever.choose([], []) == []


def test_semantic_retrieval_equals_a_plain_computation(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "load_embedder", lambda name: Letters())
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc"), rng.integers(1, 9))) for _ in range(60)]
    rows = open_rows([{"question": text, "answer": "x"} for text in texts], folder=Path())
    config = make_config(prompt={"retrieval": {"type": "semantic", "k": 5}})
    retriever = retrieval.SemanticRetriever(config, rows, k=5, model_name="letters", chunk=7)

    def likeness(one: str, other: str) -> float:
        left, right = (np.array([text.count(letter) for letter in "abc"]) for text in (one, other))
        return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))

    for index, chosen in enumerate(retriever.choose(rows.get(range(60)), list(rows.keys))):
        best = sorted((likeness(texts[index], text) for i, text in enumerate(texts) if i != index), reverse=True)[:5]
        found = [likeness(texts[index], example["question"]) for example in reversed(chosen)]
        assert np.allclose(found, best, atol=1e-5)


def test_retrieval_without_rows_is_reported(make_config: Make) -> None:
    with pytest.raises(DataError, match=r"prompt.retrieval has no rows to choose from; write prompt.retrieval.dataset"):
        build_retriever(make_config(prompt=RANDOM), training=None, folder=Path())
    unlabelled = open_rows([{"question": "x"}], folder=Path())
    with pytest.raises(DataError, match=r"has no column 'answer'"):
        build_retriever(make_config(prompt=RANDOM), training=unlabelled, folder=Path())
    assert build_retriever(make_config(), training=None, folder=Path()) is None


def test_retrieval_whose_rows_are_all_bad_is_reported(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "load_embedder", lambda name: Letters())
    config = make_config(prompt={"retrieval": {"type": "semantic"}})
    with pytest.raises(DataError, match=r"no row of dataset can serve as an example; see prompt.retrieval"):
        build_retriever(config, training=open_rows([{"question": "", "answer": ""}], folder=Path()), folder=Path())


def test_a_missing_package_is_reported_with_what_to_install() -> None:
    script = (
        "import sys\nsys.modules['sentence_transformers'] = None\n"
        "from partita.data.formatting.retrieval import load_embedder\n"
        "try:\n    load_embedder('x')\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert output == (
        "ModelError prompt.retrieval of type semantic needs sentence-transformers; "
        "run: pip install 'partita[retrieval]'\n"
    )


@pytest.mark.long
def test_a_missing_embedding_model_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    with pytest.raises(ModelError, match=r"prompt.retrieval.model_name: .*nothing cannot be loaded: "):
        retrieval.load_embedder(str(tmp_path / "nothing"))
