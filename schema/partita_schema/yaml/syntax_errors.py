"""Messages about text that is not valid YAML: what was found, and what to write instead."""

import re

import yaml
from yaml.reader import ReaderError

from partita_schema.errors import Problem

NO_SPACE = re.compile(r"(?P<start>\s*(?:- +)?)(?P<key>[A-Za-z_]\w*):(?P<value>(?!//)[^\s:].*)")
"""A key whose colon is not followed by a space."""
SECOND_COLON = re.compile(r"\s*(?:- +)*(?P<key>[^\s:#'\"{\[][^:#]*): +(?P<value>[^'\"|>&*].*: .*|[^'\"|>&*].*:)$")
"""An unquoted value that contains a colon and a space."""
CLOSED = r"(?:\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|'[^']*')"
AFTER_CLOSING = re.compile(rf"\s*(?:- +)?(?P<key>[\w-]+): +(?P<value>{CLOSED}[^,#\s].*|{CLOSED} +[^#\s].*)")
"""A value that continues after its closing brace or quote."""
PLAIN_TEXT = re.compile(r"(?:\$\{[^{}]*\}|[^\s,\[\]{}'\"])+")
"""Unquoted text inside braces or brackets, including variables."""
LOOKALIKE = re.compile(r"\s*(?:- +)?[A-Za-z_]\w*(?:(?P<colon>\uff1a)|:\u00a0)")
"""A key with a wide colon, or with a no-break space after its colon, as copied from a page."""


def syntax_problem(error: yaml.YAMLError, text: str, *, file: str | None) -> Problem:
    """Return the problem at which the YAML parser stopped, at the line that a user would fix."""
    if isinstance(error, ReaderError):
        return control_character(text, file=file)
    mark = getattr(error, "problem_mark", None)
    context = getattr(error, "context_mark", None)
    line, column = (mark.line, mark.column) if mark else (0, 0)
    start = (context.line, context.column) if context else (line, column)
    lines = [row[:500] for row in text.splitlines()]  # the patterns below take quadratic time in the length of a line
    row, column, message = explain(str(getattr(error, "problem", error)), lines, (line, column), start)
    return Problem("", message, file, row + 1, column + 1)


def control_character(text: str, *, file: str | None) -> Problem:
    match = re.search(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text)
    before = text[: match.start()] if match else ""
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    code = f"\\x{ord(match[0]):02x}" if match else "?"
    return Problem(
        "", f"the control character {code} stands here; remove it, or is this not a YAML file?", file, line, column
    )


def explain(problem: str, lines: list[str], at: tuple[int, int], start: tuple[int, int]) -> tuple[int, int, str]:
    """Return line and column (from 0) and message of a parser problem.

    Args:
        problem: Error text of the YAML parser.
        lines: Lines of the file.
        at: Line and column (from 0) where the parser stopped.
        start: Line and column (from 0) where the enclosing value starts.
    """
    line, column = at
    current = lines[line] if line < len(lines) else ""
    for row in dict.fromkeys((line, start[0])):
        if row < len(lines) and "\t" in indentation(lines[row]):
            return row, indentation(lines[row]).index("\t"), "there is a tab in the indentation; write spaces"
    found = lookalike(lines, (line, start[0])) or missing_space(lines, line, start[0])
    if found is not None:
        return found
    for row in dict.fromkeys((line, start[0])):
        match = AFTER_CLOSING.fullmatch(lines[row]) if row < len(lines) and "expected key" in problem else None
        if match:
            return row, match.start("value"), quotes(match["key"], "text that starts with a brace or quote")
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
    if "could not find expected ':'" in problem:
        return *start, "a key has no colon; write key: value"
    if "escape" in problem:
        return line, column, "a backslash in double quotes starts an escape; write single quotes or \\\\"
    if "node content" in problem:
        return (
            line,
            column,
            f"{current[column : column + 1] or 'the end'} is where a value should be; write a value",
        )
    if "expected key" in problem or "'-' indicator" in problem:
        return line, column, "the indentation fits no line above; align keys of one section with spaces"
    return line, column, f"is not YAML here ({problem}); check quotes, colons and indentation of this line"


def indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def unquoted_variable(line: str, column: int) -> re.Match[str] | None:
    """Return the match of text with a variable whose brace is at `column`, or None for another brace."""
    if not line.startswith("${", column - 1):
        return None
    return next((match for match in PLAIN_TEXT.finditer(line) if match.start() < column < match.end()), None)


def lookalike(lines: list[str], rows: tuple[int, int]) -> tuple[int, int, str] | None:
    """Return the problem of a character that only looks like a colon or a space, in the first of these lines."""
    for row in dict.fromkeys(rows):
        match = LOOKALIKE.match(lines[row]) if row < len(lines) else None
        if match:
            what = "a wide colon" if match["colon"] else "a no-break space"
            return row, match.end() - 1, f"{what} stands here; write an ordinary one"
    return None


def missing_space(lines: list[str], line: int, start: int) -> tuple[int, int, str] | None:
    """Return the problem of `epochs:3`, in the line where the parser stopped or the one above it."""
    above = next((row for row in range(min(line, len(lines)) - 1, -1, -1) if lines[row].strip()), line)
    for row in dict.fromkeys((start, line, above)):
        match = NO_SPACE.fullmatch(lines[row]) if row < len(lines) else None
        if match:
            value = match["value"].strip()
            return row, match.start("key"), f"a space is missing after the colon; write {match['key']}: {value}"
    return None


def mapping_values(lines: list[str], line: int, column: int) -> tuple[int, int, str]:
    """Return the problem of a second colon in one line, or of a line indented under one that has a value."""
    current = lines[line]
    match = SECOND_COLON.fullmatch(current)
    if match and column > match.end("key"):
        return line, match.start("value"), quotes(match["key"].strip(), "text that holds a colon")
    indent = len(indentation(current))
    return line, indent, "is indented under a line that has a value already; align it with the keys of its section"


def quotes(key: str, what: str) -> str:
    return f"{what} needs quotes; write {key}: '...' or {key}: | with the text in the next lines"
