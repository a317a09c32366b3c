"""What is wrong with a text that is no YAML, in words: what was found and what to write instead."""

import re

import yaml
from yaml.reader import ReaderError

from partita_schema.errors import Problem

NO_SPACE = re.compile(r"(?P<start>\s*(?:- +)?)(?P<key>[A-Za-z_]\w*):(?P<value>(?!//)[^\s:].*)")
"""A key whose colon is not followed by a space."""
SECOND_COLON = re.compile(r"\s*(?:- +)*(?P<key>[^\s:#'\"{\[][^:#]*): +(?P<value>[^'\"|>&*].*: .*|[^'\"|>&*].*:)$")
"""A value that holds a colon and a space without quotes."""
CLOSED = r"(?:\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|'[^']*')"
AFTER_CLOSING = re.compile(rf"\s*(?:- +)?(?P<key>[\w-]+): +(?P<value>{CLOSED}[^,#\s].*|{CLOSED} +[^#\s].*)")
"""A value that goes on after its closing brace or quote."""
PLAIN_TEXT = re.compile(r"(?:\$\{[^{}]*\}|[^\s,\[\]{}'\"])+")
"""Text without quotes inside braces or brackets, with the variables in it."""


def syntax_words(error: yaml.YAMLError, text: str, *, file: str | None) -> Problem:
    """The one mistake at which the YAML parser gave up, at the line where a person would mend it."""
    if isinstance(error, ReaderError):
        return control_character(text, file=file)
    mark = getattr(error, "problem_mark", None)
    context = getattr(error, "context_mark", None)
    line, column = (mark.line, mark.column) if mark else (0, 0)
    start = (context.line, context.column) if context else (line, column)
    lines = [row[:500] for row in text.splitlines()]  # the patterns below are quadratic in a line
    row, place, message = explain(str(getattr(error, "problem", error)), lines, (line, column), start)
    return Problem("", message, file, row + 1, place + 1)


def control_character(text: str, *, file: str | None) -> Problem:
    found = re.search(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text)
    before = text[: found.start()] if found else ""
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    code = f"\\x{ord(found[0]):02x}" if found else "?"
    return Problem(
        "", f"the control character {code} stands here; remove it, or is this no YAML file?", file, line, column
    )


def explain(problem: str, lines: list[str], at: tuple[int, int], start: tuple[int, int]) -> tuple[int, int, str]:
    """Line, column (from 0) and words."""
    line, column = at
    current = lines[line] if line < len(lines) else ""
    for row in dict.fromkeys((line, start[0])):
        if row < len(lines) and "\t" in indentation(lines[row]):
            return row, indentation(lines[row]).index("\t"), "a tab stands in the indentation; write spaces"
    joined = missing_space(lines, line, start[0])
    if joined is not None:
        return joined
    for row in dict.fromkeys((line, start[0])):
        found = AFTER_CLOSING.fullmatch(lines[row]) if row < len(lines) and "expected key" in problem else None
        if found:
            return row, found.start("value"), quotes(found["key"], "text that starts with a brace or quote")
    if "mapping values" in problem:
        return mapping_values(lines, line, column)
    if "quoted scalar" in problem or "end of stream" in problem:
        return *start, "a quote opens here and is never closed; close it"
    if "expected ',' or" in problem:
        if variable := unquoted_variable(current, column):
            message = f'the braces of a variable need quotes inside {{}} and []; write "{variable[0]}"'
            return line, variable.start(), message
        mark = lines[start[0]][start[1] : start[1] + 1]
        return *start, f"{mark} opens here and is not closed, or a comma is missing; close it or add the comma"
    if "cannot start" in problem:
        return line, column, f"text cannot start with {current[column : column + 1]}; put quotes around it"
    if "escape" in problem:
        return line, column, "a backslash in double quotes starts an escape; write single quotes or \\\\"
    if "node content" in problem:
        return (
            line,
            column,
            f"{current[column : column + 1] or 'the end'} stands where a value should be; write a value",
        )
    if "expected key" in problem or "'-' indicator" in problem:
        return line, column, "the indentation fits no line above; align keys of one section with spaces"
    return line, column, f"is no YAML here ({problem}); check quotes, colons and indentation of this line"


def indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def unquoted_variable(line: str, column: int) -> re.Match[str] | None:
    """The text with a variable whose brace stands at `column`; None for another brace."""
    if not line.startswith("${", column - 1):
        return None
    return next((found for found in PLAIN_TEXT.finditer(line) if found.start() < column < found.end()), None)


def missing_space(lines: list[str], line: int, start: int) -> tuple[int, int, str] | None:
    """`epochs:3`, in the line where the parser gave up or in the one above it."""
    above = next((row for row in range(min(line, len(lines)) - 1, -1, -1) if lines[row].strip()), line)
    for row in dict.fromkeys((start, line, above)):
        found = NO_SPACE.fullmatch(lines[row]) if row < len(lines) else None
        if found:
            value = found["value"].strip()
            return row, found.start("key"), f"a space is missing after the colon; write {found['key']}: {value}"
    return None


def mapping_values(lines: list[str], line: int, column: int) -> tuple[int, int, str]:
    """A second colon in one line, or a line that is indented under one that has a value already."""
    current = lines[line]
    found = SECOND_COLON.fullmatch(current)
    if found and column > found.end("key"):
        return line, found.start("value"), quotes(found["key"].strip(), "text that holds a colon")
    indent = len(indentation(current))
    return line, indent, "is indented under a line that has a value already; align it with the keys of its section"


def quotes(key: str, what: str) -> str:
    return f"{what} needs quotes; write {key}: '...' or {key}: | with the text in the next lines"
