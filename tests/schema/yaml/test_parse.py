"""Tests of the YAML reader: values with positions, and error messages for pitfalls of YAML."""

import pytest

from partita_schema.errors import ConfigError
from partita_schema.yaml.parse import plain_value, read_yaml


def message_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, file="f.yaml")
    return str(caught.value)


def test_every_key_and_value_has_its_position() -> None:
    root, problems = read_yaml("a: 1\nb:\n  - c: x\n", file="f.yaml")
    node = root.find(("b", 0, "c"))
    assert node is not None
    assert node.position is not None
    assert node.key_position is not None
    assert (node.value, node.position.line, node.position.column, node.key_position.column) == ("x", 3, 8, 5)
    assert problems == ()


def test_keys_are_read_as_written_text() -> None:
    assert read_yaml("yes: 1\n2: 3\n", file=None)[0].plain() == {"yes": 1, "2": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("1_000", 1000),
        ("0x1f", 31),
        ("1.5", 1.5),
        ("1.0e-4", 0.0001),
        ("1e-4", "1e-4"),
        ("~", None),
        ("yes", True),
        ("off", False),
        ("y", "y"),
        ("2024-01-01", "2024-01-01"),
        ("", None),
        ("9" * 200, "9" * 200),
    ],
)
def test_plain_scalars_are_read_as_in_yaml_1_1_but_dates_are_texts(text: str, value: object) -> None:
    assert plain_value(text) == value


def test_anchors_and_merges_work() -> None:
    root, _ = read_yaml("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\nc: *x\nd: {<<: [*x, {r: 4}]}\n", file=None)
    assert root.plain() == {
        "a": {"p": 1, "q": 2},
        "b": {"p": 1, "q": 3},
        "c": {"p": 1, "q": 2},
        "d": {"p": 1, "q": 2, "r": 4},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n\tb: 1\n", "2:1: there is a tab in the indentation; write spaces"),
        ("b: 1\n\tc: 2\n", "2:1: there is a tab in the indentation; write spaces"),
        ("a: 1\nseed 3\nb: 2\n", "2:1: a key has no colon; write key: value"),
        ("a: 1\nseed:\u00a03\n", "2:6: a no-break space stands here; write an ordinary one"),
        ("a: 1\nseed\uff1a3\n", "2:5: a wide colon stands here; write an ordinary one"),
        ("epochs:3\nb: 1\n", "1:1: a space is missing after the colon; write epochs: 3"),
        ("b: 1\nt:\n  x: 1\n  epochs:3\n", "4:3: a space is missing after the colon; write epochs: 3"),
        (
            "t: {x} and {y}\n",
            (
                "1:4: text that starts with a brace or quote needs quotes; write t: '...' or t: | with the text "
                "in the next lines"
            ),
        ),
        (
            "t: Classify: {x}\n",
            ("1:4: text that holds a colon needs quotes; write t: '...' or t: | with the text in the next lines"),
        ),
        ("t: {{x}}\n", "1:5: t: a key is a mapping in braces; put quotes around text with braces or brackets"),
        ("t: @x\n", "1:4: text cannot start with @; put quotes around it"),
        ("a: 'x\nb: 1\n", "1:4: a quote opens here and is never closed; close it"),
        (
            "a: {type: x, path: ${VAR}}\n",
            '1:20: the braces of a variable need quotes inside {} and []; write "${VAR}"',
        ),
        (
            "a:\n  [b, /data/${A}/${B:-no c}.csv]\n",
            '2:7: the braces of a variable need quotes inside {} and []; write "/data/${A}/${B:-no c}.csv"',
        ),
        ("a: [1, 2\nb: 3\n", "1:4: [ opens here and is not closed, or a comma is missing; close it or add the comma"),
        (
            "a: 1\n  b: 2\n",
            "2:3: is indented under a line that has a value already; align it with the keys of its section",
        ),
        ("a:\n  b: 1\n c: 2\n", "3:2: the indentation fits no line above; align keys of one section with spaces"),
        ('a: "\\q"\n', "1:5: a backslash in double quotes starts an escape; write single quotes or \\\\"),
        ("a: }\n", "1:4: } is where a value should be; write a value"),
        ("a: x\x01\n", "1:5: the control character \\x01 stands here; remove it, or is this not a YAML file?"),
        ("a: !foo bar\n", "1:4: a: has the YAML tag !foo; remove it, tags are not read"),
        ("a: *x\n", "1:4: a: *x refers to nothing; write &x before it, or quote it"),
        ("a: &x [*x]\n", "1:8: a[0]: *x contains itself; write the values out"),
        ("a: {<<: 3}\n", "1:5: a: << merges mappings only; write << : *anchor of a mapping"),
        ("a: 1\n---\nb: 1\n", "2:1: a second document starts here; write one, without ---"),
        ("a: " + "[" * 99, "1:67: is nested more than 64 levels deep; write it flatter"),
        (
            "a: | x\n  b\n",
            (
                "1:6: is not YAML here (did not find expected comment or line break); check quotes, colons and "
                "indentation of this line"
            ),
        ),
    ],
)
def test_invalid_yaml_is_reported(text: str, message: str) -> None:
    assert message_of(text) == f"f.yaml:{message}"


def test_reading_continues_after_duplicate_keys_and_old_numbers() -> None:
    _, problems = read_yaml("a: 1\na: 2\nb: 010\nc: 1:30\n", file="f.yaml")
    assert [str(problem) for problem in problems] == [
        "f.yaml:2:1: a: the key occurs twice, first in line 1; keep one",
        "f.yaml:3:4: b: 010 is a number in octal to YAML; write '010' in quotes, or a plain number",
        "f.yaml:4:4: c: 1:30 is a number in base 60 to YAML; write '1:30' in quotes, or a plain number",
    ]
