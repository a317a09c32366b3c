"""Tests of redaction: the API key never leaves the client, in whatever form a server echoes it."""

import base64
import html
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from partita import Model
from partita.backends.endpoint.redaction import LONGEST_MESSAGE, Redaction
from partita_schema.errors import ModelError

from .conftest import LocalServer, Response, answer, error, prompt_of

MakeFile = Callable[..., dict[str, Any]]
KEY = 'sk-proj-Ab3/xY+9_zQ&7"kL8=mN2'
REDACTION = Redaction(KEY)

FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "percent": lambda key: quote(key, safe=""),
    "percent in small letters": lambda key: quote(key, safe="").lower(),
    "percent of each character": lambda key: "".join(f"%{ord(letter):02X}" for letter in key),
    "percent twice": lambda key: quote(quote(key, safe=""), safe=""),
    "a form": quote_plus,
    "JSON": lambda key: json.dumps(key),
    "JSON in JSON": lambda key: json.dumps(json.dumps(key)),
    "JSON escapes of each character": lambda key: "".join(f"\\u{ord(letter):04x}" for letter in key),
    "JSON with escaped slashes": lambda key: key.replace("/", "\\/"),
    "Python": repr,
    "hex escapes": lambda key: "".join(f"\\x{ord(letter):02x}" for letter in key),
    "HTML": html.escape,
    "HTML numbers": lambda key: "".join(f"&#{ord(letter)};" for letter in key),
    "HTML hex numbers": lambda key: "".join(f"&#x{ord(letter):X};" for letter in key),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 for addresses": lambda key: base64.urlsafe_b64encode(key.encode()).decode(),
    "base64 of a header": lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    "base64 of a user and key": lambda key: base64.b64encode(f"ab:{key}".encode()).decode(),
    "hexadecimal": lambda key: key.encode().hex(),
    "small letters": str.lower,
    "capitals": str.upper,
    "spaced": " ".join,
    "lines": "\n".join,
    "zero width": "\u200b".join,
    "coloured": lambda key: "\x1b[31m".join(key),
    "terminal": lambda key: f"{key[:9]}\x1b[0m{key[9:]}",
    "first half": lambda key: key[: len(key) // 2],
    "last half": lambda key: key[len(key) // 2 :],
    "cut at the end": lambda key: key[:-3] + "...",
}


def left_of(text: str, form: str) -> int:
    """Return the length of the longest part of `form` in `text`."""
    longest = 0
    for start in range(len(form)):
        while form[start : start + longest + 1] in text and start + longest < len(form):
            longest += 1
    return longest


@pytest.mark.parametrize("form", FORMS)
def test_messages_do_not_contain_the_key_in_any_form(form: str) -> None:
    written = FORMS[form](KEY)
    redacted = REDACTION.message(f"wrong key {written} for you")
    assert redacted.startswith("wrong key ")
    assert redacted.endswith(" for you")
    assert "***" in redacted
    assert left_of(redacted, KEY) < 10
    assert left_of(redacted, " ".join(written.split())) <= 10


@pytest.mark.parametrize("form", [form for form in FORMS if "half" not in form])
def test_answers_do_not_contain_the_key_in_any_form(form: str) -> None:
    written = FORMS[form](KEY)
    redacted = REDACTION.answer(f"It is\n {written} , I think")
    assert redacted.startswith("It is\n ")
    assert redacted.endswith(" , I think")
    assert left_of(redacted, written) < len(written) // 2


@pytest.mark.parametrize("place", range(LONGEST_MESSAGE - 40, LONGEST_MESSAGE + 5, 3))
def test_a_key_at_the_end_of_a_shortened_message_is_not_cut_in_two(place: int) -> None:
    redacted = REDACTION.message("#" * place + KEY + "#" * 600)
    assert len(redacted) <= LONGEST_MESSAGE
    assert left_of(redacted, KEY) == 0


@pytest.mark.parametrize("start", ["\x1b]", "\x1b]0;", "\x1bP", "\x1b_", "\x1b[", "\x1b[31", "\x1b"])
@pytest.mark.parametrize("key", [KEY, "0123456789;0123456789", "[0123456789abcdef"])
def test_a_key_inside_of_a_terminal_escape_sequence_is_removed(start: str, key: str) -> None:
    redaction = Redaction(key)
    for end in ("", "\x07", "\x1b\\", " the rest"):
        redacted = redaction.answer(f"a{start}{key}{end}")
        assert redacted.startswith("a\x1b")
        assert redacted.endswith(f"***{end}")
        assert left_of(redacted, key) <= 2
        assert left_of(redaction.message(f"a{start}{key}{end}"), key) < len(key) / 3 + 1


@given(st.text(), st.text())
@example("\x1b]", "")
def test_text_around_the_key_is_kept(before: str, after: str) -> None:
    assert REDACTION.answer(before) == before
    redacted = REDACTION.answer(f"{before}|{KEY}|{after}")
    assert redacted == f"{before}|***|{after}"


def test_an_answer_similar_to_the_key_is_kept() -> None:
    for text in ("sk-proj- is how keys begin", "Ab3 xY 9 zQ", KEY[:10], "%41%42 \\u0041 &amp; \\"):
        assert REDACTION.answer(text) == text


def test_a_placeholder_key_is_not_redacted_in_answers() -> None:
    redaction = Redaction("EMPTY")
    assert redaction.answer("the list is EMPTY") == "the list is EMPTY"
    assert redaction.message("key EMPTY of EMPTYNESS") == "key *** of EMPTYNESS"
    assert Redaction(None).message("no key") == Redaction(None).answer("no key") == "no key"


def test_a_message_is_one_line_that_is_safe_to_print() -> None:
    redacted = Redaction(None).message("a\x1b[31mred\x1b[0m\n\tb\x1b]0;title\x07c\x9b1md\u202ee\x00\x08f\ud800")
    assert redacted == "ared bc1mdef\ufffd"
    assert Redaction(None).message("x" * 1000) == "x" * 497 + "..."


def echoes(body: dict[str, Any], form: str) -> dict[str, Response]:
    written = FORMS[form](KEY)
    return {
        "an answer": answer(body, f"the key is {written}"),
        "a long answer": answer(body, "x " * 245 + written),
        "a refused row": error(400, f"no {written}"),
        "a long refusal": error(400, "x" * 480 + written),
        "a failing server": error(500, f"oh {written}"),
        "no JSON": Response(200, f"<b>{written}</b>"),
        "no answer": Response(200, {"key": written, "pad": "x" * 1000}),
        "a refusal of the model": answer(body, "", message={"content": None, "refusal": written}),
        "an odd finish_reason": answer(body, "", message={"content": None}, finish_reason=written),
    }


@pytest.mark.parametrize("form", ["plain", "percent", "base64", "JSON escapes of each character"])
def test_no_file_or_log_contains_the_key(
    server: LocalServer, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, caplog: Any, form: str
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    cases = list(echoes({"messages": [{"content": ""}]}, form))

    def reply(body: dict[str, Any]) -> Response:
        return echoes(body, form)[cases[int(prompt_of(body))]]

    server.reply = reply
    rows = [{"question": str(number)} for number in range(len(cases))]
    for output in ("out.jsonl", "out.csv"):
        with caplog.at_level(logging.DEBUG):
            file = make_file({"api_key_env": "MY_KEY", "retries": 1})
            result = Model(file, quiet=True).predict(rows, output, fresh=True)
        assert result.stats.rows == len(rows)
        assert [row["status"] for row in result] == ["ok"] * 2 + ["error"] * 7
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert "the server repeats the API key in its answers" in caplog.text
    texts = [caplog.text, *(path.read_text(encoding="utf-8") for path in Path().rglob("*") if path.is_file())]
    assert len(texts) >= 4
    for text in texts:
        assert left_of(text, KEY) < 10
        assert left_of(text, FORMS[form](KEY)) < 14


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_the_target_of_a_redirect_does_not_contain_the_key(
    server: LocalServer, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    server.reply = lambda body: Response(status, "", {"Location": f"http://other/v1?api_key={quote(KEY, safe='')}&a=b"})
    with pytest.raises(ModelError) as caught:
        Model(make_file({"api_key_env": "MY_KEY"}), quiet=True).predict([{"question": "a"}], "out.jsonl")
    assert f"the server sends elsewhere ({status}), to http://other/v1?api_key=***&a=b" in str(caught.value)
