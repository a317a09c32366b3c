import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.column_checks import check_columns
from partita.data.dialogue import Expander, expanded
from partita.data.rows import Rows
from partita.data.run_data import training_streams
from partita.data.sources.sources import open_rows
from partita.data.splits import folds_of, hash_share, hash_splits, open_splits, random_splits, stratified_splits
from partita_schema.errors import DataError

Make = Callable[..., Any]


def table(length: int) -> list[dict[str, Any]]:
    return [
        {"question": f"why {i}?", "answer": f"because {i}", "kind": "ab"[i % 2], "place": "train" if i % 3 else "test"}
        for i in range(length)
    ]


def numbers(rows: Rows) -> list[int]:
    return [int(row["question"][4:-1]) for row in rows.get(range(len(rows)))]


def failure(config: Any, dataset: Any) -> str:
    with pytest.raises(DataError) as error:
        open_splits(config, folder=Path(), dataset=dataset)
    return str(error.value)


@given(
    length=st.integers(1, 300),
    seed=st.integers(0, 9),
    shares=st.sampled_from([(0.05, 0.05), (0.5, 0.3), (0.0, 0.9), (0, 0)]),
)
def test_a_random_split_assigns_every_row_once_and_training_rows_exist(
    length: int, seed: int, shares: tuple[float, float]
) -> None:
    split_N = random_splits(length, shares, seed=seed)

    counts = Counter(split_N.tolist())
    assert counts[0] >= 1
    assert counts.total() == length
    assert set(counts) <= {0, 1, 2}
    if length * (1 - sum(shares)) >= 2:
        assert [counts[1], counts[2]] == [int(length * share + 0.5) for share in shares]
    assert np.array_equal(split_N, random_splits(length, shares, seed=seed))


@given(values=st.lists(st.sampled_from("abcde"), min_size=1, max_size=300), seed=st.integers(0, 3))
def test_a_stratified_split_has_the_fractions_for_every_label(values: list[str], seed: int) -> None:
    split_N = stratified_splits(values, (0.2, 0.1), seed=seed)

    assert np.any(split_N == 0)
    for label in set(values):
        here = split_N[np.array(values) == label]
        assert abs(np.sum(here != 0) - 0.3 * len(here)) <= 1
        assert abs(np.sum(here == 2) - 0.1 * len(here)) <= 2
    assert np.array_equal(split_N, stratified_splits(values, (0.2, 0.1), seed=seed))


@given(values=st.lists(st.text(max_size=5), min_size=1, max_size=50), more=st.lists(st.text(max_size=5), max_size=50))
def test_a_hash_split_does_not_move_rows_when_others_are_added(values: list[str], more: list[str]) -> None:
    assert np.any(hash_splits(values, (0.2, 0.2), seed=1) == 0)
    values = ["training row 0", *values]

    few, many = (hash_splits(rows, (0.2, 0.2), seed=1) for rows in (values, [*values, *more]))

    assert few[0] == 0
    assert np.array_equal(many[: len(values)], few)


def test_a_hash_split_has_about_the_given_fractions() -> None:
    split_N = hash_splits([str(i) for i in range(5000)], (0.2, 0.1), seed=1)

    assert abs(np.mean(split_N == 1) - 0.2) < 0.02
    assert abs(np.mean(split_N == 2) - 0.1) < 0.02


def test_a_missing_value_in_a_column_of_integers_moves_no_row(make_config: Make) -> None:
    config = make_config(data={"split": {"type": "hash", "column": "user", "probabilities": [0.5, 0.25, 0.25]}})
    users = [*range(40)]

    def training(values: list[Any]) -> list[str]:
        rows = pd.DataFrame({"question": map(str, range(len(values))), "answer": "a", "user": values})
        chosen = open_splits(config, folder=Path(), dataset=rows)["training"]
        return [row["question"] for row in chosen.get(range(len(chosen)))]

    assert [number for number in training([*users, None]) if number != "40"] == training(users)


def test_a_source_of_a_mix_without_training_rows_does_not_move_rows_of_another_split_into_training(
    make_config: Make, tmp_path: Path
) -> None:
    marks = {f"user {number}": hash_share(f"user {number}", 42) for number in range(40)}
    tested = max(marks, key=lambda user: marks[user])
    for name, users in (("a", list(marks)), ("b", [tested] * 3)):
        lines = [json.dumps({"question": "q", "answer": "a", "user": user}) + "\n" for user in users]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    split = {"type": "hash", "column": "user", "probabilities": [0.5, 0.25, 0.25]}
    mix = [{"source": "a.jsonl"}, {"source": "b.jsonl"}]
    with pytest.raises(DataError, match=r"no row of .*b\.jsonl is a training row; see data\.split"):
        open_splits(make_config(data={"split": split, "mix": mix}), folder=tmp_path)


def test_a_hash_split_depends_on_the_seed() -> None:
    values = [str(i) for i in range(200)]
    first, again, other = (hash_splits(values, (0.2, 0.2), seed=seed).tolist() for seed in (1, 1, 2))

    assert first == again != other


def test_the_default_split_is_90_5_5_and_rows_keep_their_order(make_config: Make) -> None:
    splits = open_splits(make_config(), folder=Path(), dataset=table(100))

    assert {name: len(rows) for name, rows in splits.items()} == {"training": 90, "validation": 5, "test": 5}
    dealt = [numbers(rows) for rows in splits.values()]
    assert all(part == sorted(part) for part in dealt)
    assert sorted(number for part in dealt for number in part) == list(range(100))


def test_the_split_depends_on_the_seed(make_config: Make) -> None:
    first, again, other = (
        numbers(open_splits(make_config(seed=seed), folder=Path(), dataset=table(100))["test"]) for seed in (1, 1, 2)
    )

    assert first == again != other


def test_few_rows_are_all_used_for_training(make_config: Make) -> None:
    assert list(open_splits(make_config(), folder=Path(), dataset=table(5))) == ["training"]


def test_rows_passed_as_an_argument_replace_the_source(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nwhy 7?,x\n")
    config = make_config(data={"source": "a.csv"})

    assert numbers(open_splits(config, folder=tmp_path)["training"]) == [7]
    assert numbers(open_splits(config, folder=tmp_path, dataset=table(1))["training"]) == [0]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.csv").write_text("question,answer\nwhy 8?,x\n")
    monkeypatch.chdir(tmp_path / "here")
    assert numbers(open_splits(config, folder=tmp_path, dataset="a.csv")["training"]) == [8]


def test_a_split_with_a_separate_source_gets_no_rows_of_the_source(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text("question,answer\nwhy 7?,x\n")

    splits = open_splits(make_config(data={"validation": "v.csv"}), folder=tmp_path, dataset=table(100))

    assert {name: len(rows) for name, rows in splits.items()} == {"training": 95, "validation": 1, "test": 5}


def test_evaluation_needs_no_training_rows(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("question,answer\nwhy 7?,x\n")
    data = {"test": "t.csv"}

    splits = open_splits(make_config(data=data, trainer={"type": "none"}), folder=tmp_path)
    assert {name: numbers(rows) for name, rows in splits.items()} == {"test": [7]}

    with pytest.raises(DataError, match=r"^there are no rows: write data\.source"):
        open_splits(make_config(data=data), folder=tmp_path)


def test_a_column_can_define_the_split(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("question,answer\nwhy 7?,x\n")
    split = {"type": "fixed", "column": "place"}

    splits = open_splits(make_config(data={"split": split}), folder=Path(), dataset=table(7))
    assert {name: numbers(rows) for name, rows in splits.items()} == {"training": [1, 2, 4, 5], "test": [0, 3, 6]}

    config = make_config(data={"split": split, "test": "t.csv"})
    splits = open_splits(config, folder=tmp_path, dataset=table(7))
    assert {name: numbers(rows) for name, rows in splits.items()} == {"training": [1, 2, 4, 5], "test": [7]}


@pytest.mark.parametrize("value", [2, 2.0, "2", "TEST", " test "])
def test_a_fixed_split_accepts_numbers_and_names(value: Any, make_config: Make) -> None:
    rows = [row | {"split": 0} for row in table(2)] + [table(1)[0] | {"split": value}]

    splits = open_splits(make_config(data={"split": {"type": "fixed"}}), folder=Path(), dataset=rows)

    assert {name: len(part) for name, part in splits.items()} == {"training": 2, "test": 1}


def test_rows_are_sampled_before_the_split(make_config: Make) -> None:
    for sample in ({"sample_size": 40}, {"sample_ratio": 0.4}):
        splits = open_splits(make_config(preprocessing=sample), folder=Path(), dataset=table(100))
        assert {name: len(rows) for name, rows in splits.items()} == {"training": 36, "validation": 2, "test": 2}
        chosen = [numbers(rows) for rows in splits.values()]
        assert all(part == sorted(part) for part in chosen), "rows keep their order"
        assert max(number for part in chosen for number in part) > 40, "they are not the first ones"


def test_unreadable_rows_are_counted_for_the_training_rows(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "why 1?", "answer": "x"}\n' * 30 + "broken\n")

    splits = open_splits(make_config(), folder=Path("elsewhere"), dataset=tmp_path / "a.jsonl")

    assert {name: [bad.key for bad in rows.bad] for name, rows in splits.items()} == {
        "training": ["a.jsonl:31"],
        "validation": [],
        "test": [],
    }


def with_broken_lines(path: Path, *, rows: int, each: int) -> Path:
    """Write rows to a file, with a broken line after each `each` of them."""
    lines = []
    for number in range(rows):
        lines.append(json.dumps({"question": f"why {number}?", "answer": "so"}))
        lines += ["broken"] if number % each == each - 1 else []
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_unreadable_rows_keep_their_places_between_the_rows_of_a_split(make_config: Make, tmp_path: Path) -> None:
    path = with_broken_lines(tmp_path / "a.jsonl", rows=100, each=20)
    splits = open_splits(make_config(preprocessing={"sample_size": 60}), folder=Path(), dataset=path)

    training = splits["training"]
    assert len(training) == 54
    assert training.bad
    for bad in training.bad:
        before = [number for number in numbers(training) if number < bad.number - bad.number // 21]
        assert bad.num_before == len(before)


def test_dialogues_of_a_split_are_expanded_though_the_last_line_cannot_be_read(
    make_config: Make, tmp_path: Path
) -> None:
    episode = json.dumps({"episode": [{"text": "x", "labels": ["y"]}, {"text": "z", "labels": ["y"]}]}) + "\n"
    (tmp_path / "a.jsonl").write_text(episode * 40 + "{broken\n", encoding="utf-8")
    config = make_config(input_features=[{"name": "episode", "type": "dialogue"}])
    training = open_splits(config, folder=Path(), dataset=tmp_path / "a.jsonl")["training"]

    rows = expanded(training, Expander(column="episode", format_name="auto", mode="squash"))
    assert (len(training), len(rows)) == (36, 72)
    assert [bad.num_before for bad in rows.bad] == [72]


def test_as_many_unreadable_rows_as_rows_are_sampled(make_config: Make, tmp_path: Path) -> None:
    path = with_broken_lines(tmp_path / "a.jsonl", rows=4000, each=20)
    splits = open_splits(make_config(preprocessing={"sample_ratio": 0.25}), folder=Path(), dataset=path)

    assert sum(map(len, splits.values())) == 1000
    assert 30 < len(splits["training"].bad) < 70


def test_the_training_rows_of_a_dataset_with_splits_are_sampled(make_config: Make) -> None:
    part = datasets.Dataset.from_list(table(100))
    dataset = datasets.DatasetDict({"train": part, "validation": part})
    splits = open_splits(make_config(preprocessing={"sample_size": 10}), folder=Path(), dataset=dataset)

    assert {name: len(rows) for name, rows in splits.items()} == {"training": 10, "validation": 100}


def test_stratified_and_hash_splits_are_configured(make_config: Make) -> None:
    for kind in ("stratify", "hash"):
        split = {
            "type": kind,
            "column": "kind" if kind == "stratify" else "question",
            "probabilities": [0.5, 0.25, 0.25],
        }
        splits = open_splits(make_config(data={"split": split}), folder=Path(), dataset=table(80))
        assert sorted(number for rows in splits.values() for number in numbers(rows)) == list(range(80))
    assert {name: len(rows) for name, rows in splits.items()} != {"training": 40, "validation": 20, "test": 20}


@given(labels=st.lists(st.sampled_from("abc"), min_size=5, max_size=200), folds=st.integers(2, 5))
def test_every_row_is_in_one_fold_and_folds_have_the_same_size_and_labels(labels: list[str], folds: int) -> None:
    keys = [f"rows.jsonl:{number}" for number in range(len(labels))]
    fold_N = folds_of(keys, folds, seed=3, labels=labels)
    assert set(fold_N.tolist()) <= set(range(folds))
    for wanted in (set("abc"), *({label} for label in "abc")):
        counts = [
            sum(label in wanted for label, fold in zip(labels, fold_N, strict=True) if fold == k) for k in range(folds)
        ]
        assert max(counts) - min(counts) <= 1
    order = np.random.default_rng(len(labels)).permutation(len(labels))
    moved = folds_of([keys[at] for at in order], folds, seed=3, labels=[labels[at] for at in order])
    assert np.array_equal(moved, fold_N[order])


def test_each_row_is_validated_in_one_fold_and_trained_on_in_the_others(make_config: Make) -> None:
    validated: list[int] = []
    for fold in (1, 2, 3):
        split = {"type": "kfold", "folds": 3, "fold": fold}
        splits = open_splits(make_config(data={"split": split}), folder=Path(), dataset=table(20))
        assert sorted(numbers(splits["training"]) + numbers(splits["validation"])) == list(range(20))
        validated += numbers(splits["validation"])
    assert sorted(validated) == list(range(20))


def test_fewer_rows_than_folds_are_refused(make_config: Make) -> None:
    config = make_config(data={"split": {"type": "kfold", "folds": 5}})
    assert failure(config, table(4)) == ("dataset has 4 rows, fewer than 5 folds; write fewer data.split.folds")


def test_training_rows_of_a_dataset_with_splits_are_divided_into_folds_and_its_test_rows_are_kept(
    make_config: Make,
) -> None:
    parts = {"train": datasets.Dataset.from_list(table(9)), "test": datasets.Dataset.from_list(table(4))}
    validated: list[int] = []
    for fold in (1, 2, 3):
        config = make_config(data={"split": {"type": "kfold", "folds": 3, "fold": fold}})
        splits = open_splits(config, folder=Path(), dataset=datasets.DatasetDict(parts))
        assert {name: len(rows) for name, rows in splits.items()} == {"training": 6, "validation": 3, "test": 4}
        validated += numbers(splits["validation"])
    assert sorted(validated) == list(range(9))


def test_rows_that_are_not_divided_into_folds_are_refused(make_config: Make) -> None:
    config = make_config(data={"split": {"type": "kfold", "folds": 3}})
    rows = datasets.Dataset.from_list(table(9))
    assert failure(config, datasets.DatasetDict({"train": rows, "validation": rows})) == (
        "the DatasetDict has a validation split, and data.split: {type: kfold} validates each fold on its own rows; "
        "remove one of them"
    )
    assert failure(config, rows.to_iterable_dataset()) == (
        "the IterableDataset is a stream, which is not divided into folds; write another data.split"
    )


def test_wrong_columns_are_reported(make_config: Make, tmp_path: Path) -> None:
    assert failure(make_config(), [{"questoin": "x", "answer": "y"}]) == (
        "dataset has no column 'question', which input question needs; its columns are questoin, answer; "
        "did you mean 'questoin'?"
    )
    assert failure(make_config(prompt={"template": "{question} {hint}"}), table(2)) == (
        "dataset has no column 'hint', which prompt.template needs; its columns are question, answer, kind, place"
    )
    assert failure(make_config(), [{"question;answer": "x;y"}]) == (
        "dataset has no column 'question', which input question needs; its columns are question;answer; the separator "
        "looks like ';', read the file with that one"
    )
    (tmp_path / "a.csv").write_text("fine,good\nso,so\n", encoding="utf8")
    assert failure(make_config(), str(tmp_path / "a.csv")) == (
        "a.csv has no column 'question', which input question needs; its columns are fine, good; if its first line is "
        "a row, write a line with the names of the columns before it, or name them in header: [...] at the source"
    )
    split = {"type": "fixed", "column": "fold"}
    assert failure(make_config(data={"split": split}), table(2)).startswith(
        "dataset has no column 'fold', which data.split needs"
    )


def test_only_supervised_rows_need_answers(make_config: Make) -> None:
    rows = open_rows([{"question": "x"}], folder=Path())

    check_columns(rows, make_config(), supervised=False)
    with pytest.raises(DataError, match=r"has no column 'answer', which output answer needs; its columns are question"):
        check_columns(rows, make_config(), supervised=True)


def test_other_impossible_splits_are_reported(make_config: Make) -> None:
    assert failure(make_config(), None) == (
        "there are no rows: write data.source in the file, or pass a dataset (--dataset PATH)"
    )
    fixed = make_config(data={"split": {"type": "fixed", "column": "place"}})
    assert failure(fixed, [row | {"place": "test"} for row in table(3)]) == (
        "no row of dataset is a training row; see data.split"
    )
    assert failure(fixed, [row | {"place": "somewhere"} for row in table(3)]) == (
        "dataset:1: column 'place' holds 'somewhere'; write 0, 1, 2 or train, validation, test"
    )


def test_rows_without_a_dialogue_are_reported_with_their_columns(make_config: Make) -> None:
    config = make_config(
        input_features=[{"name": "messages", "type": "dialogue"}], output_features=[{"name": "reply", "type": "text"}]
    )
    with pytest.raises(DataError) as caught:
        open_splits(config, folder=Path(), dataset=[{"message": "a", "team": "b"}])
    assert str(caught.value) == (
        "dataset has no column 'messages', which dialogue messages needs, and not the columns of another format; "
        "its columns are message, team; write column: message at the input"
    )


def test_a_mapped_column_that_is_missing_is_reported_with_its_key(make_config: Make) -> None:
    config = make_config(
        input_features=[{"name": "messages", "type": "dialogue"}],
        output_features=[{"name": "reply", "type": "text"}],
        data={"dialogue": {"columns": {"instruction": "question", "output": "answer"}}},
    )
    with pytest.raises(DataError) as caught:
        open_splits(config, folder=Path(), dataset=[{"questions": "a", "answer": "b"}])
    assert str(caught.value) == (
        "dataset has no column 'question', which data.dialogue.columns.instruction needs; its columns are questions, "
        "answer; did you mean 'questions'?"
    )
    assert open_splits(config, folder=Path(), dataset=[{"question": "a"}])


def test_a_missing_file_is_reported_with_its_key_and_folder(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for data, key in (
        ({"source": "no.csv"}, "data.source"),
        ({"source": "no.csv", "split": {"type": "random"}}, "data.source"),
        ({"mix": [{"source": "no.csv"}, {"source": "b.csv"}]}, "data.mix[0].source"),
        ({"validation": "no.csv"}, "data.validation"),
        ({"test": {"type": "simulation", "path": "no.csv"}}, "data.test"),
    ):
        assert failure(make_config(data=data), None) == f"{key}: no.csv does not exist in {tmp_path}"
    assert failure(make_config(), "no.csv") == f"no.csv does not exist in {tmp_path}"
    streamed = {"source": {"type": "csv", "path": "no.csv", "streaming": True}}
    trainer = {"type": "finetune", "max_steps": 1}
    with pytest.raises(DataError) as caught:
        training_streams(make_config(data=streamed, trainer=trainer), folder=Path()).first_rows()
    assert str(caught.value) == f"data.source: no.csv does not exist in {tmp_path}"
