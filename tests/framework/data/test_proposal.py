"""Tests of the proposal from a data file: the output, its type and labels, the inputs, and columns that are neither."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from partita.data.columns import Column, column_of
from partita.data.first_rows import read_first_rows
from partita.data.proposal import FIRST_ROWS, Proposal, proposal_of
from partita_schema.cells import CellError
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.load import load_config
from partita_schema.sections.outputs.set import SetOutput
from partita_schema.templates import TASKS, template

from ...json_lines import write_json_lines

SHORT = ["fine", "awful", "it works", "broken on arrival"]


def rows_file(folder: Path, rows: list[dict[str, Any]], ending: str = "jsonl") -> str:
    path = folder / f"rows.{ending}"
    if ending == "jsonl":
        write_json_lines(path, rows)
    elif ending == "csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    elif ending == "arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        pd.DataFrame(rows).to_parquet(path)
    return str(path)


def propose(path: str, *, task: str | None) -> Proposal | None:
    rows = read_first_rows(path)
    return rows.propose(task) if rows else None


def first_columns(path: str) -> Sequence[Column]:
    rows = read_first_rows(path)
    assert rows is not None
    return rows.columns


def config_of(path: str, task: str | None = None) -> tuple[str, Config]:
    """Return the proposed task and the configuration that init would write."""
    proposal = propose(path, task=task)
    assert proposal is not None
    text = template(proposal.task, model="scratch", data=path, train=True, features=proposal.features)
    return proposal.task, load_config(text).config


def shape(config: Config) -> tuple[list[str], list[tuple[str, str]]]:
    return [one.name for one in config.input_features], [(one.name, one.type) for one in config.output_features]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "arrow"])
def test_a_column_with_few_values_is_a_category_with_all_labels(ending: str, tmp_path: Path) -> None:
    rows = [{"id": n, "review": f"{SHORT[n % 4]} {n}", "stars": 1 + n % 5, "mood": "ab"[n % 2]} for n in range(40)]
    task, config = config_of(rows_file(tmp_path, rows, ending))
    assert (task, shape(config)) == ("classify", (["review"], [("mood", "category")]))
    assert list(config.output_features[0].labels or ()) == ["a", "b"]
    assert config.prompt.task == "Classify the review as a or b."


@pytest.mark.parametrize(
    "labels",
    [["0.0", "1.0"], ["1e3", "2e3"], ["1", "1.0"], ["007", "008"]],
    ids=lambda labels: labels[0],
)
@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_labels_that_look_like_numbers_are_those_that_the_output_reads(
    ending: str, labels: list[str], tmp_path: Path
) -> None:
    rows = [{"text": f"text {n}", "label": f" {labels[n % 2]} "} for n in range(20)]
    [output] = config_of(rows_file(tmp_path, rows, ending))[1].output_features
    assert (output.type, sorted(output.labels or ())) == ("category", labels)
    assert [output.cell_reader()(row["label"]) for row in rows] == [row["label"].strip() for row in rows]


def test_numbers_are_a_score_if_the_name_or_the_task_suggests_it(tmp_path: Path) -> None:
    rows = [{"essay": f"text {n}", "rating": 1 + n % 5} for n in range(30)]
    path = rows_file(tmp_path, rows)
    assert config_of(path)[0] == "score"
    assert shape(config_of(path)[1]) == (["essay"], [("rating", "number")])
    graded = rows_file(tmp_path, [{"essay": f"text {n}", "class": n % 3} for n in range(30)])
    assert config_of(graded)[1].output_features[0].type == "category"
    assert config_of(graded, task="score")[1].output_features[0].type == "number"


def test_questions_have_answers_and_inputs_with_missing_values_are_filled(tmp_path: Path) -> None:
    rows = [{"instruction": f"do {n}", "input": "" if n % 2 else f"to {n}", "output": f"done {n}"} for n in range(20)]
    task, config = config_of(rows_file(tmp_path, rows), "answer")
    assert (task, shape(config)) == ("answer", (["instruction", "input"], [("output", "text")]))
    assert [one.preprocessing.missing_value_strategy for one in config.input_features] == [
        "drop_row",
        "fill_with_const",
    ]


def test_objects_are_extracted_with_a_schema_of_their_keys(tmp_path: Path) -> None:
    rows = [{"mail": f"mail {n}", "fields": {"name": "x", "age": n}} for n in range(20)]
    task, config = config_of(rows_file(tmp_path, rows))
    assert (task, shape(config)) == ("extract", (["mail"], [("fields", "json")]))
    assert "age" in str(config.output_features[0])


def test_lists_with_few_labels_are_sets_and_other_lists_are_json(tmp_path: Path) -> None:
    tags = [["red"], ["red", "blue"], [], ["green"]]
    rows = [{"text": f"a text {n}", "tags": tags[n % 4], "words": [f"w{n}"]} for n in range(40)]
    task, config = config_of(rows_file(tmp_path, rows))
    assert (task, shape(config)) == ("tag", (["text"], [("tags", "set")]))
    assert config.output_features[0].labels == ("red", "blue", "green")
    assert config.prompt.task == "Write those of the labels red, blue, green that apply to the text, as a JSON array."
    assert shape(config_of(rows_file(tmp_path, rows), "extract")[1])[1] == [("words", "json")]


def test_labels_in_lists_have_no_white_space_around_them(tmp_path: Path) -> None:
    tags = [["red "], [" red", "blue"], [], ["green"]]
    path = rows_file(tmp_path, [{"text": f"a text {n}", "tags": tags[n % 4]} for n in range(40)])
    assert config_of(path)[1].output_features[0].labels == ("red", "blue", "green")


@pytest.mark.parametrize("separator", [",", "; ", "|"])
def test_text_that_combines_few_labels_is_a_set_with_their_separator(separator: str, tmp_path: Path) -> None:
    tags = [separator.join(one) for one in (["red"], ["red", "blue"], ["green"], ["blue", "green"])]
    rows = [{"text": f"a text {n}", "tags": tags[n % 4]} for n in range(40)]
    output = config_of(rows_file(tmp_path, rows, "csv"))[1].output_features[0]
    assert isinstance(output, SetOutput)
    assert (output.labels, output.preprocessing.separator) == (("red", "blue", "green"), separator.strip())
    cities = ["Oslo, Norway", "Rome, Italy", "Kyiv, Ukraine"]
    rows = [{"text": f"a text {n}", "city": cities[n % 3]} for n in range(40)]
    assert shape(config_of(rows_file(tmp_path, rows))[1])[1] == [("city", "category")]


def test_messages_are_a_dialogue(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    task, config = config_of(rows_file(tmp_path, [{"messages": chat}] * 3))
    assert task == "chat"
    assert [(one.name, one.type) for one in config.input_features] == [("messages", "dialogue")]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"instruction": "do", "input": "", "output": "done"}, "instruction, output"),
        ({"prompt": "do", "completion": "done"}, "prompt, completion"),
        ({"prompt": "do", "completion": "done", "system": "be kind"}, "system, prompt, completion"),
    ],
)
def test_dialogues_that_are_spread_over_columns_are_recognized(
    row: dict[str, str], columns: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, [{key: f"{value} {n}" for key, value in row.items()} for n in range(20)])
    proposal = propose(path, task=None)
    assert proposal is not None
    assert proposal.summary == f"input {columns} (dialogue in columns), output: the assistant's replies"
    assert shape(config_of(path)[1]) == (["messages"], [("reply", "text")])
    assert proposal.warning == ""


@pytest.mark.parametrize(("messages", "chosen"), [(1, "conversations"), (9, "messages")])
def test_of_several_columns_with_dialogues_the_one_of_most_rows_is_chosen(
    messages: int, chosen: str, tmp_path: Path
) -> None:
    few: dict[str, Any] = {"messages": [{"role": "user", "content": "do"}, {"role": "assistant", "content": "done"}]}
    many: dict[str, Any] = {"conversations": [{"from": "human", "value": "do"}, {"from": "gpt", "value": "done"}]}
    proposal = propose(rows_file(tmp_path, [few] * messages + [many] * (10 - messages)), task=None)
    assert proposal is not None
    assert proposal.summary == f"input {chosen} (dialogue), output: the assistant's replies"


def test_a_column_with_system_messages_is_a_part_of_dialogues(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "do"}, {"role": "assistant", "content": "done"}]
    path = rows_file(tmp_path, [{"system": f"be kind {n}", "messages": said} for n in range(20)])
    proposal = propose(path, task=None)
    assert proposal is not None
    assert proposal.summary == "input system, messages (dialogue), output: the assistant's replies"
    assert shape(config_of(path)[1]) == (["messages"], [("reply", "text")])


@pytest.mark.parametrize(
    ("row", "inputs", "prompt"),
    [
        ({"prompt": "do", "chosen": "done", "rejected": "no"}, [("prompt", "text")], "prompt"),
        ({"chosen": "do: done", "rejected": "do: no"}, [], "their common beginning"),
        (
            {"system": "be kind", "prompt": "do", "chosen": "done", "rejected": "no"},
            [("messages", "dialogue")],
            "the dialogue before them",
        ),
        (
            {"system": "be kind", "question": "do", "chosen": "done", "rejected": "no"},
            [("question", "text")],
            "question; not used: system",
        ),
        (
            {"instruction": "do", "input": "", "chosen": "done", "rejected": "no"},
            [("messages", "dialogue")],
            "the dialogue before them",
        ),
        (
            {"chosen": [{"role": "user", "content": "do"}], "rejected": [{"role": "user", "content": "do"}]},
            [("messages", "dialogue")],
            "the dialogue before them",
        ),
        (
            {"conversations": [{"from": "human", "value": "do"}], "chosen": "done", "rejected": "no"},
            [("conversations", "dialogue")],
            "the dialogue before them",
        ),
    ],
    ids=["prompt", "texts", "system", "system and question", "alpaca", "whole dialogues", "conversations"],
)
def test_pairs_of_answers_are_recognized(
    row: dict[str, Any], inputs: list[tuple[str, str]], prompt: str, tmp_path: Path
) -> None:
    rows = [{key: f"{value} {n}" if isinstance(value, str) else value for key, value in row.items()} for n in range(20)]
    path = rows_file(tmp_path, rows)
    proposal = propose(path, task=None)
    task, config = config_of(path)

    assert proposal is not None
    assert proposal.summary == f"answers chosen and rejected, prompt: {prompt}"
    assert (task, config.trainer.type) == ("pairs", "preference")
    assert [(feature.name, feature.type) for feature in config.input_features] == inputs
    assert shape(config)[1] == [("answer", "preference")]


def test_only_the_chosen_answer_of_a_pair_is_learned_on_request(tmp_path: Path) -> None:
    rows = [{"prompt": f"do {n}", "chosen": f"done {n}", "rejected": f"no {n}"} for n in range(20)]
    path = rows_file(tmp_path, rows)
    proposal = propose(path, task="chat")

    assert proposal is not None
    assert proposal.warning == "only chosen is learned; --task pairs learns from both answers"
    assert shape(config_of(path, "chat")[1]) == (["messages"], [("reply", "text")])


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"prompt": "do", "completion": "done", "label": True}, (["prompt"], [("completion", "text")])),
        ({"question": "do", "answer": "done", "liked": 0}, (["question"], [("answer", "text")])),
        (
            {
                "messages": [{"role": "user", "content": "do"}, {"role": "assistant", "content": "done"}],
                "kto_tag": True,
            },
            (["messages"], [("reply", "text")]),
        ),
    ],
)
def test_answers_that_are_good_or_bad_are_recognized(row: dict[str, Any], names: Any, tmp_path: Path) -> None:
    verdict = next(key for key in ("label", "liked", "kto_tag") if key in row)
    rows = [
        {key: f"{value} {n}" if isinstance(value, str) else value for key, value in row.items()} | {verdict: n % 2 == 0}
        for n in range(20)
    ]
    path = rows_file(tmp_path, rows)
    task, config = config_of(path)

    assert (task, config.trainer.type, shape(config)) == ("feedback", "kto", names)
    assert config.output_features[0].more_columns == (verdict,)


@pytest.mark.parametrize(
    ("row", "summary"),
    [
        ({"prompt": "do", "completion": "done"}, "input prompt, output completion, good or bad by label"),
        (
            {"system": "be kind", "prompt": "do", "completion": "done"},
            "input prompt, output completion, good or bad by label; not used: system",
        ),
        (
            {"system": "be kind", "messages": [{"role": "user", "content": "do"}], "completion": "done"},
            "input messages, output reply, good or bad by label",
        ),
    ],
)
def test_a_summary_of_labelled_answers_says_whether_system_messages_are_read(
    row: dict[str, Any], summary: str, tmp_path: Path
) -> None:
    rows = [
        {key: f"{value} {n}" if isinstance(value, str) else value for key, value in row.items()} | {"label": n % 2 == 0}
        for n in range(20)
    ]
    proposal = propose(rows_file(tmp_path, rows), task=None)
    assert proposal is not None
    assert proposal.summary == summary


def test_a_label_with_other_values_is_classified(tmp_path: Path) -> None:
    rows = [{"prompt": f"do {n}", "completion": f"done {n}", "label": "ab"[n % 2]} for n in range(20)]
    task, config = config_of(rows_file(tmp_path, rows))
    assert (task, shape(config)) == ("classify", (["prompt", "completion"], [("label", "category")]))


def test_other_columns_do_not_fit_the_tasks_of_preferences(tmp_path: Path) -> None:
    path = rows_file(tmp_path, [{"question": f"do {n}", "answer": f"done {n}"} for n in range(20)])
    assert propose(path, task="pairs") is None
    assert propose(path, task="feedback") is None


def test_dialogues_that_cannot_be_read_give_a_warning(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "narrator", "content": "x"}]}] * 3
    proposal = propose(rows_file(tmp_path, rows), task=None)
    assert proposal is not None
    assert proposal.warning == (
        "all rows cannot be read as dialogues, the first because message 2: the role is 'narrator'; write one of "
        "system, user, assistant, tool"
    )


@pytest.mark.parametrize("about", [{}, {"url": "https://host/a", "meta": {"n": 1}, "date": "2024-05-01"}])
def test_text_without_an_answer_is_language_modelling(about: dict[str, Any], tmp_path: Path) -> None:
    path = rows_file(tmp_path, [{"text": f"a long story {n} " * 20} | about for n in range(9)])
    task, config = config_of(path)
    assert (task, shape(config), config.data.batching.type) == ("continue", ([], [("text", "text")]), "chunk")
    lines = tmp_path / "lines.txt"
    lines.write_text("one\ntwo\n", encoding="utf8")
    assert config_of(str(lines))[0] == "continue"
    labelled = rows_file(tmp_path, [{"text": f"a long story {n} " * 20, "label": "ab"[n % 2]} for n in range(9)])
    assert config_of(labelled)[0] == "classify"
    assert config_of(labelled, "continue")[1].plain_text


def test_addresses_and_dates_are_not_shown_to_the_model(tmp_path: Path) -> None:
    rows = [
        {"review": f"text {n}", "when": f"2024-01-{n % 28 + 1:02}", "seen": f"http://h/{n}", "stars": 1 + n % 5}
        for n in range(40)
    ]
    proposal = propose(rows_file(tmp_path, rows), task=None)
    assert proposal is not None
    assert proposal.summary == "input review, output stars (number); not used: when, seen"


def test_many_labels_are_a_category_in_a_column_that_is_named_like_one(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "intent": f"intent {n % 60}"} for n in range(600)]
    _, config = config_of(rows_file(tmp_path, rows))
    assert len(config.output_features[0].labels or ()) == 60
    named = rows_file(tmp_path, [{"text": f"text {n}", "city": f"city {n % 60}"} for n in range(600)])
    assert shape(config_of(named)[1])[1] == [("city", "text")]


def test_lists_next_to_words_are_their_tags(tmp_path: Path) -> None:
    rows = [{"id": n, "tokens": ["in", f"Oslo{n}"], "ner_tags": ["O", "B-LOC" if n % 2 else "O"]} for n in range(20)]
    task, config = config_of(rows_file(tmp_path, rows))
    assert (task, shape(config)) == ("entities", (["tokens"], [("ner_tags", "tags")]))
    assert config.output_features[0].labels == ("B-LOC", "O")
    other = rows_file(tmp_path, [row | {"ner_tags": ["O"]} for row in rows])
    assert shape(config_of(other)[1])[1] != [("ner_tags", "tags")]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("task", [None, "entities"])
def test_numbers_next_to_words_are_their_tags_and_need_names(ending: str, task: str | None, tmp_path: Path) -> None:
    rows = [{"id": f"{n}", "tokens": ["in", f"Oslo{n % 4}"], "ner_tags": [0, n % 3 * 4]} for n in range(20)]
    path = rows_file(tmp_path, rows, ending)
    proposal = propose(path, task=task)
    assert proposal is not None
    assert proposal.summary == "input tokens, output ner_tags (tags, numbers from 0 to 8); not used: id"
    assert proposal.warning == (
        "the tags in ner_tags are numbers, from 0 to 8 in all rows; before you train, write their names in the order "
        "of the numbers, as decoder: {labels: [...]}"
    )
    chosen, config = config_of(path, task)
    assert (chosen, shape(config)) == ("entities", (["tokens"], [("ner_tags", "tags")]))
    assert config.output_features[0].labels is None
    with pytest.raises(CellError, match=r"the tag 0 is an index of labels; write them as decoder: {labels: \[...\]}"):
        config.output_features[0].cell_reader()([0, 4])

    line = "    # decoder: {labels: [O, B-PER, I-PER]}   # write the names of the numbers, 0 to 8 in all rows\n"
    assert line in proposal.features
    named = proposal.features.replace("# decoder", "decoder", 1)
    output = load_config(template(chosen, model="scratch", data=path, train=True, features=named)).config
    assert output.output_features[0].cell_reader()([0, 2]) == ["O", "I-PER"]


def test_tags_with_names_come_before_numbers(tmp_path: Path) -> None:
    rows = [{"tokens": ["in", f"Oslo{n % 4}"], "bio": ["O", "B-LOC"], "heads": [0, 1]} for n in range(20)]
    proposal = propose(rows_file(tmp_path, rows, "jsonl"), task=None)
    assert proposal is not None
    assert proposal.summary == "input tokens, output bio (tags, 2 labels); not used: heads"


@pytest.mark.parametrize(("task", "kind"), [("answer", "text"), ("extract", "json")])
def test_numbers_of_another_task_are_no_tags(task: str, kind: str, tmp_path: Path) -> None:
    rows = [{"tokens": ["in", f"Oslo{n % 4}"], "ner_tags": [0, n % 4]} for n in range(20)]
    proposal = propose(rows_file(tmp_path, rows, "jsonl"), task=task)
    assert proposal is not None
    assert proposal.summary == f"input tokens, output ner_tags ({kind})"
    assert not proposal.warning
    assert "decoder" not in proposal.features


@pytest.mark.parametrize("numbers", [[-1, 0], [0, 100], [0, 0.5], [0, True], [0], [0, "O"], [[0], [1]]], ids=str)
def test_other_lists_next_to_words_are_no_tags(numbers: list[Any], tmp_path: Path) -> None:
    rows = [{"tokens": ["in", f"Oslo{n}"], "heads": numbers} for n in range(20)]
    columns = {column.name: column.kind for column in first_columns(rows_file(tmp_path, rows))}
    assert columns["heads"] != "tags"
    ids = rows_file(tmp_path, [{"tokens": [n, n + 1], "tags": [0, 1]} for n in range(20)])
    assert {column.kind for column in first_columns(ids)} == {"json"}


def test_rows_that_cannot_be_read_and_a_missing_header_give_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": "x"}\n{broken\n{"text": "b", "label": "y"}\n', encoding="utf8")
    proposal = propose(str(path), task=None)
    assert proposal is not None
    assert proposal.warning.startswith("1 row of the first 3 cannot be read, the first because not JSON: ")
    table = tmp_path / "rows.csv"
    for text in ("I did not like this one,bad\nfine,good\n", "bad,poor\nfine,good\nawful,poor\n"):
        table.write_text(text, encoding="utf8")
        proposal = propose(str(table), task=None)
        assert proposal is not None
        assert proposal.warning == (
            "its first line looks like a row; write a line with the names of the columns before it, or name them in "
            "header: [...] at the source"
        )


def test_a_value_that_equals_its_key_is_no_missing_header_in_json_lines(tmp_path: Path) -> None:
    path = rows_file(tmp_path, [{"text": "text", "label": "x"}, {"text": "b", "label": "y"}])
    proposal = propose(path, task=None)
    assert proposal is not None
    assert "first line" not in proposal.warning


def test_message_keys_that_are_not_read_are_written_as_ignored_and_named(tmp_path: Path) -> None:
    chat = [{"speaker": "user", "text": "hi", "state": {"a": 1}}, {"speaker": "system", "text": "hello", "my id": 2}]
    path = rows_file(tmp_path, [{"turns": chat, "note": "x"}, {"turns": chat[:1]}])
    proposal = propose(path, task=None)
    assert proposal is not None
    assert proposal.summary == "input turns (dialogue), output: the assistant's replies; ignored: state, my id"
    keys = proposal.ignore_keys
    text = template(proposal.task, model="scratch", data=path, train=True, features=proposal.features, ignore_keys=keys)
    assert load_config(text).config.data.dialogue.ignore_keys == ("state", "my id")


def test_labels_of_only_the_first_rows_are_written_as_a_comment(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(FIRST_ROWS)] + [{"text": "x", "label": "c"}]
    proposal = propose(rows_file(tmp_path, rows), task=None)
    assert proposal is not None
    assert "# decoder: {labels: [a, b]}   # labels of the first 2,000 rows" in proposal.features
    assert config_of(rows_file(tmp_path, rows))[1].output_features[0].labels is None


def test_without_a_fitting_column_or_file_there_is_no_proposal(tmp_path: Path) -> None:
    path = rows_file(tmp_path, [{"translation": {"en": f"{n}", "fr": f"{n}"}} for n in range(9)])
    assert propose(path, task=None) is None
    assert propose(rows_file(tmp_path, [{"n": n} for n in range(9)]), task="continue") is None
    assert propose(rows_file(tmp_path, [{"q": f"a {n}", "a": f"b {n}"} for n in range(9)]), task="classify") is None
    assert read_first_rows("s3://bucket/rows.jsonl") is None
    assert read_first_rows("owner/dataset") is None


def test_a_file_that_does_not_exist_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, message in (
        ("rows.csv", f"rows.csv does not exist in {tmp_path}"),
        ("*.csv", f"no file matches *.csv in {tmp_path}"),
        ("no/rows.csv", "no/rows.csv does not exist: there is no folder no"),
        ("rows.xyz", "rows.xyz: the file extension is not one of a known format"),
    ):
        with pytest.raises(DataError) as caught:
            read_first_rows(path)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize("column", ["status", "error", "model"])
def test_a_name_that_results_use_is_the_column_only(column: str, tmp_path: Path) -> None:
    rows = [{"message": f"text {number}", column: ("open", "closed")[number % 2]} for number in range(8)]
    path = rows_file(tmp_path, rows)
    [output] = config_of(path)[1].output_features
    assert (output.name, output.source_column, output.type) == (f"{column}_value", column, "category")
    proposal = propose(path, task=None)
    assert proposal is not None
    assert f"# the name {column} has another meaning in results" in proposal.features


@pytest.mark.parametrize(("count", "rows"), [(3, "all rows"), (FIRST_ROWS + 1, "the first 2,000 rows")])
def test_an_output_with_one_value_gives_a_warning(count: int, rows: str, tmp_path: Path) -> None:
    same = [{"text": f"text {number}", "label": "x" * 200} for number in range(count)]
    proposal = propose(rows_file(tmp_path, same), task=None)
    assert proposal is not None
    assert proposal.warning == (
        f"the output label is '{'x' * 57}...' in {rows}, so there is nothing to learn; name another output column, or "
        "use rows with different answers"
    )
    different = propose(rows_file(tmp_path, [*same[:2], {"text": "other", "label": "y"}]), task=None)
    assert different is not None
    assert not different.warning


def test_episodes_of_parlai_are_dialogues(tmp_path: Path) -> None:
    path = tmp_path / "task.parlai"
    path.write_text("text:hello\tlabels:hi\ntext:how are you?\tlabels:fine\tepisode_done:True\n", encoding="utf8")
    task, config = config_of(str(path))
    assert (task, shape(config)) == ("chat", (["episode"], [("reply", "text")]))


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{broken\n", encoding="utf8")
    with pytest.raises(DataError, match="has no row that can be read: not JSON: "):
        read_first_rows(str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        read_first_rows(str(tmp_path / "rows.jsonl.gz"))
    (tmp_path / "rows.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        read_first_rows(str(tmp_path / "rows.parquet"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)


@given(
    names=st.lists(st.text(min_size=1, max_size=6).filter(str.strip), min_size=1, max_size=4, unique=True),
    values=st.lists(JSON, min_size=1, max_size=30),
    task=st.sampled_from([None, *TASKS]),
)
def test_any_rows_give_features_as_valid_yaml_or_none(names: list[str], values: list[Any], task: str | None) -> None:
    columns: list[Column] = [column_of(name, values[index::2]) for index, name in enumerate(names)]
    proposal = proposal_of(columns, task=task, complete=True)
    if proposal is not None:
        features = yaml.safe_load(proposal.features)
        assert features["output_features"][0]["name"] in [*names, "reply"]
