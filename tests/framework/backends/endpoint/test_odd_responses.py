"""Tests of invalid responses: each is an error of its row only."""

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from partita import Model
from partita.backends.endpoint.receiving import MAX_CHUNKS

from .conftest import RawServer, prompt_of, whole

MakeFile = Callable[..., dict[str, Any]]
GOOD = json.dumps({"choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}]}).encode()


def json_of(**changes: Any) -> bytes:
    return json.dumps(json.loads(GOOD) | changes).encode()


def predict(
    raw_server: RawServer, make_file: MakeFile, odd: Iterable[bytes] | Callable[[], Iterable[bytes]], **backend: Any
) -> tuple[Any, ...]:
    """Return status, answer and error of the second of three rows; the others get valid responses."""

    def reply(body: dict[str, Any]) -> Iterable[bytes]:
        if prompt_of(body) != "1":
            return [whole(GOOD)]
        return odd() if callable(odd) else odd

    raw_server.reply = reply
    file = make_file({"url": raw_server.url, "retries": 0, **backend})
    result = Model(file, quiet=True).predict(
        [{"question": str(number)} for number in range(3)], "out.jsonl", fresh=True
    )
    assert [result[number]["answer"] for number in (0, 2)] == ["fine", "fine"]
    return result[1]["status"], result[1]["answer"], result[1]["error"]


@pytest.mark.parametrize("charset", ["idna", "rot13", "hex", "utf-16", "utf-7", "unicode_escape", "undefined", "zip"])
def test_the_charset_of_a_response_does_not_matter(raw_server: RawServer, make_file: MakeFile, charset: str) -> None:
    header = f"Content-Type: application/json; charset={charset}".encode()
    assert predict(raw_server, make_file, [whole(GOOD, headers=[header])]) == ("ok", "fine", None)
    refused = whole(b"no \xff", headers=[header], status=b"HTTP/1.1 400 no")
    result = predict(raw_server, make_file, [refused])
    assert result == ("error", None, "the server refused the row (400): no \ufffd")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"[" * 100_000, "the server's response is nested too deeply"),
        (b'{"choices":' + b"[" * 900 + b"]" * 900 + b"}", "the server's response holds no answer: {"),
        (json_of(usage=None).replace(b"null", b"1" * 5000), "the server's response is not JSON: {"),
        (
            b"[" + b'{"":0},' * 500_000 + b"0]",
            "the server's response has more than 500,000 lists and objects",
        ),
        (b"\xff\xfe", "the server's response is not JSON: \ufffd\ufffd"),
        (GOOD.decode().encode("utf-16"), "the server's response is not JSON: "),
    ],
)
def test_odd_json_is_an_error_of_its_row(
    raw_server: RawServer, make_file: MakeFile, body: bytes, expected: str
) -> None:
    status, answer, error = predict(raw_server, make_file, [whole(body)])
    assert (status, answer) == ("error", None)
    assert error.startswith(expected)
    assert len(error) <= 500


def test_a_count_of_401_digits_is_ignored(raw_server: RawServer, make_file: MakeFile) -> None:
    body = json_of(usage={"prompt_tokens": 10**400, "completion_tokens": 10**400})
    limits = {"tokens_per_minute": 10**6}
    assert predict(raw_server, make_file, [whole(body)], **limits) == ("ok", "fine", None)


def test_the_size_of_a_response_is_limited(raw_server: RawServer, make_file: MakeFile) -> None:
    message = "the server's response is larger than 0.01 MB; write a larger backend.max_response_mb"
    large = json_of(pad="x" * 11_000)
    limit = {"max_response_mb": 0.01}
    assert predict(raw_server, make_file, [whole(large)], **limit) == ("error", None, message)
    endless = b"HTTP/1.1 200 OK\r\n\r\n"

    def drip() -> Iterator[bytes]:
        yield endless
        while True:
            yield b" " * 1000

    assert predict(raw_server, make_file, drip, **limit) == ("error", None, message)
    assert predict(raw_server, make_file, [whole(large)]) == ("ok", "fine", None)


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        (b"gzip", gzip.compress(GOOD, mtime=0)),
        (b"X-GZip", gzip.compress(GOOD, mtime=0)),
        (b"deflate", zlib.compress(GOOD)),
        (b"deflate", zlib.compress(GOOD)[2:-4]),
        (b"identity", GOOD),
    ],
)
def test_compressed_responses_are_read(
    raw_server: RawServer, make_file: MakeFile, encoding: bytes, packed: bytes
) -> None:
    response = whole(packed, headers=[b"Content-Encoding: " + encoding])
    assert predict(raw_server, make_file, [response]) == ("ok", "fine", None)


@pytest.mark.parametrize(
    ("encoding", "packed", "expected"),
    [
        (b"br", GOOD, "the server's response has the content encoding 'br', and gzip, deflate were requested"),
        (b"gzip, gzip", GOOD, "the server's response has the content encoding 'gzip, gzip', and gzip, deflate"),
        (b"gzip", GOOD, "the server's response cannot be decompressed: Error -3 while decompressing data"),
        (b"gzip", gzip.compress(GOOD, mtime=0)[:-20], "the server's response is not JSON: {"),
    ],
)
def test_responses_that_cannot_be_decompressed_are_reported(
    raw_server: RawServer, make_file: MakeFile, encoding: bytes, packed: bytes, expected: str
) -> None:
    response = whole(packed, headers=[b"Content-Encoding: " + encoding])
    status, _, error = predict(raw_server, make_file, [response])
    assert (status, error[: len(expected)]) == ("error", expected)


def test_a_decompression_bomb_is_refused(raw_server: RawServer, make_file: MakeFile) -> None:
    bomb = gzip.compress(bytes(200_000_000), compresslevel=1)
    response = whole(bomb, headers=[b"Content-Encoding: gzip"])
    tracemalloc.start()
    try:
        result = predict(raw_server, make_file, [response], max_response_mb=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result[2] == "the server's response is larger than 1 MB; write a larger backend.max_response_mb"
    assert peak < 30_000_000


def test_a_response_in_too_many_chunks_is_refused(raw_server: RawServer, make_file: MakeFile) -> None:
    chunks = b"1\r\n \r\n" * (MAX_CHUNKS + 1000)
    response = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n"]
    message = "the server's response comes in more than 50,000 chunks"
    assert predict(raw_server, make_file, response) == ("error", None, message)


def test_a_prompt_that_cannot_be_sent_is_an_error_of_its_row(raw_server: RawServer, make_file: MakeFile) -> None:
    raw_server.reply = lambda body: [whole(GOOD)]
    rows = [{"question": "a"}, {"question": "\ud800"}, {"question": "b"}]
    result = Model(make_file({"url": raw_server.url}), quiet=True).predict(rows, "out.jsonl")
    assert [row["status"] for row in result] in (["ok", "error", "ok"], ["ok", "ok", "ok"])
