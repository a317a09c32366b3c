import json
from pathlib import Path
from typing import Any

import pytest

from partita.data.sources.sources import open_rows
from partita_schema.errors import DataError

TEXT = (
    "text:hello\\nthere\tlabels:hi|good day\n"
    "text:how are you?\tlabels:fine\tlabel_candidates:fine|bad\tepisode_done:True\n"
    "\n"
    "id:task\ttext:a:b\teval_labels:one__PIPE__two\tepisode_done:True\n"
    "text:never ended\tlabels:so\n"
)


def rows_of(folder: Path, text: str | bytes) -> Any:
    path = folder / "task.parlai"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return open_rows(str(path), folder=folder)


def test_an_episode_is_a_row_numbered_by_its_first_line(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, TEXT)

    assert rows.get(range(3)) == [
        {
            "episode": [
                {"text": "hello\nthere", "labels": ["hi", "good day"]},
                {"text": "how are you?", "labels": ["fine"]},
            ]
        },
        {"episode": [{"text": "a:b", "labels": ["one|two"]}]},
        {"episode": [{"text": "never ended", "labels": ["so"]}]},
    ]
    assert list(rows.keys) == ["task.parlai:1", "task.parlai:4", "task.parlai:5"]


def test_the_type_may_be_given_for_another_file_extension(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TEXT)

    assert len(open_rows({"type": "parlai", "path": "train.txt"}, folder=tmp_path)) == 3


def test_a_broken_line_affects_only_its_episode(tmp_path: Path) -> None:
    good = b"text:a\tlabels:b\tepisode_done:True\n"
    rows = rows_of(
        tmp_path, good + b"text:a\tlabels:b\nnothing here\ntext:c\tepisode_done:True\n" + good + b"text:\xff\n"
    )

    assert len(rows) == 2
    assert [(bad.number, bad.reason) for bad in rows.bad] == [
        (2, "line 3 has neither text: nor labels:; write text:...<tab>labels:..."),
        (6, "line 6: not UTF-8: byte 0xff at position 6"),
    ]


def test_unknown_fields_are_kept_and_a_field_without_a_key_is_an_error(
    tmp_path: Path,
) -> None:
    rows = rows_of(
        tmp_path,
        "text:a\tpersona:I\\nam\tlabels:b\tepisode_done:True\ntext:a\tand more\tlabels:b\t\tepisode_done:True\n",
    )

    assert rows.get([0]) == [{"episode": [{"text": "a", "persona": "I\nam", "labels": ["b"]}]}]
    assert [(bad.number, bad.reason) for bad in rows.bad] == [
        (2, r"line 2: 'and more' is not a field; write key:value, and \t for a tab in a text")
    ]


def test_a_file_without_an_exchange_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task.parlai has no good row: task.parlai:1: line 1 has neither text"):
        rows_of(tmp_path, json.dumps({"text": "json"}))
