import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.formats.base import BLOCK, WRITE_ENCODING
from partita.data.formats.parlai import episode_end
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
        (
            6,
            f"line 6: not UTF-8: byte 0xff at position 6; {WRITE_ENCODING}",
        ),
    ]


def test_a_field_that_a_line_has_twice_makes_its_episode_bad(tmp_path: Path) -> None:
    good = b"text:a\tlabels:b\tepisode_done:True\n"
    rows = rows_of(tmp_path, b"text:a\ttext:b\tlabels:c\tepisode_done:True\n" + good)

    assert len(rows) == 1
    assert [bad.reason for bad in rows.bad] == ["line 1 has the field 'text' twice; remove or rename one"]


END = "episode_done:True\n"
LIMIT = 200


def rows_and_bad(folder: Path, text: str | bytes) -> tuple[list[Any], list[tuple[str, str]]]:
    """Return the texts of each row, and the keys and reasons of the bad ones."""
    (folder / "task.parlai").write_bytes(text.encode() if isinstance(text, str) else text)
    rows = open_rows("task.parlai", folder=folder, max_row_bytes=LIMIT)
    texts = [[exchange["text"] for exchange in row["episode"]] for row in rows.get(range(len(rows)))]
    return texts, [(bad.key, bad.reason) for bad in rows.bad]


@pytest.mark.parametrize("size", [LIMIT, 2 * BLOCK])
@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("text:{}\tlabels:b\tepisode_done:True", True),
        ("text:{}\tlabels:b\tepisode_done:True\r", True),
        ("text:{}\tlabels:b\tepisode_done: true\treward:1", True),
        ("episode_done:1\ttext:{}\tlabels:b", True),
        ("text:a\tepisode_done:False\tlabels:{}\tepisode_done:True\tpersona:{}", True),
        ("text:{}\tlabels:b", False),
        ("text:{}\tlabels:episode_done:True", False),
        ("text:a\tepisode_done:True\tlabels:{}\tepisode_done:False", False),
    ],
)
def test_a_line_that_is_too_long_may_end_its_episode(tmp_path: Path, size: int, line: str, ends: bool) -> None:
    good = "text:{}\tlabels:b\t" + END
    long = line.replace("{}", "x" * size) + "\n"

    texts, bad = rows_and_bad(
        tmp_path, good.format("first") + "text:a\tlabels:b\n" + long + good.format("second") + good.format("third")
    )

    assert texts == [["first"], *([["second"]] if ends else []), ["third"]]
    reason = f"line 3: the line is longer than {LIMIT} bytes; write a larger data.max_row_bytes if it is meant"
    assert bad == [("task.parlai:2", reason)]


@given(st.lists(st.sampled_from(["\t", "episode_done:", "True", "text:", " ", "x" * 80])).map("".join), st.integers(0))
def test_the_end_of_an_episode_is_found_wherever_a_long_line_is_cut(text: str, cut: int) -> None:
    line = text.encode()
    first, second = line[: cut % (len(line) + 1)], line[cut % (len(line) + 1) :]

    assert episode_end(episode_end(first) + second) == episode_end(line)
    assert len(episode_end(line)) < 200


def test_an_episode_that_is_too_long_is_skipped_to_its_end(tmp_path: Path) -> None:
    lines = "".join(f"text:q{number}\tlabels:b\n" for number in range(31))

    texts, bad = rows_and_bad(tmp_path, lines + "text:last\tlabels:b\t" + END + "text:next\tlabels:b\t" + END + lines)

    assert texts == [["next"]]
    reason = "the episode is longer than 200 bytes; write episode_done:True in its last line, or a larger "
    assert bad == [(f"task.parlai:{number}", f"{reason}data.max_row_bytes if it is meant") for number in (1, 34)]


@pytest.mark.parametrize("end", ["True", "true", "1"])
def test_a_line_that_is_not_utf8_may_end_its_episode(tmp_path: Path, end: str) -> None:
    good = b"text:a\tlabels:b\tepisode_done:True\n"

    texts, bad = rows_and_bad(tmp_path, b"text:\xff\tepisode_done:" + end.encode() + b"\n" + good)

    assert (texts, [key for key, _ in bad]) == ([["a"]], ["task.parlai:1"])


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
