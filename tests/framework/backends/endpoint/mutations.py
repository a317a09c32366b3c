"""Responses of broken or hostile servers: valid responses mutated by a seeded generator."""

import base64
import copy
import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

KEY = 'sk-proj-Ab3/xY+9_zQ&7"kL8=mN2'
"""The API key that is sent, and that servers echo."""
ECHOES: tuple[Callable[[str], str], ...] = (
    str,
    lambda key: quote(key, safe=""),
    lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    lambda key: "".join(f"\\u{ord(letter):04x}" for letter in key),
    lambda key: "\x1b[1m".join(key),
    lambda key: key[:20],
)
CHARSETS = ("idna", "rot13", "hex", "utf-16", "utf-7", "undefined", "unicode_escape", "zlib", "x" * 300, "\xff")
TEXTS = (
    "",
    "x" * 300_000,
    "\x00",
    "\ud800",
    "\x1b]0;owned\x07",
    "=1+1",
    "9" * 401,
    "NaN",
    "{" * 3000,
    "\u202e",
    "```" + "a" * 60_000,
)
ODD_VALUES = (None, True, -1, 1.5, 1e308, 10**20, 10**401, float("nan"), float("inf"), [], {}, [[]], [None] * 50)
STATUSES = (*range(200, 206), 300, 301, 302, 307, 308, *range(400, 432), 451, 499, *range(500, 512), 599, 999)


@dataclass(frozen=True)
class Case:
    """The response to one request."""

    kind: str
    pieces: tuple[bytes, ...]


class Mutator:
    """Creates responses from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kinds: dict[str, Callable[[], bytes | tuple[bytes, ...]]] = {
            "status line": self.status_line,
            "headers": self.headers,
            "encoding": self.encoding,
            "chunks": self.chunks,
            "cut": self.cut,
            "JSON": self.json,
            "values": self.values,
            "nesting": self.nesting,
            "bytes": self.bytes,
            "redirect": self.redirect,
            "echo": self.echo,
            "error": self.error,
            "flips": self.flips,
            "slow": self.slow,
        }

    def case(self, number: int) -> Case:
        """Return the case with this number; the kinds take turns."""
        kind = list(self.kinds)[number % len(self.kinds)]
        made = self.kinds[kind]()
        return Case(kind, (made,) if isinstance(made, bytes) else made)

    def echoed(self) -> str:
        """Return the key in the forms in which servers echo it."""
        return self.random.choice(ECHOES)(KEY)

    def text(self) -> str:
        return self.random.choice((*TEXTS, "fine", '{"a": [1]}', f"the key is {self.echoed()}"))

    def good(self) -> dict[str, Any]:
        """Return a valid response of a chat or of a completion."""
        return {
            "id": "1",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "fine"},
                    "text": "fine",
                    "logprobs": {"content": [{"token": "fine", "logprob": -0.5}], "token_logprobs": [-0.5]},
                }
            ],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        }

    def body(self) -> bytes:
        return json.dumps(self.good()).encode()

    def response(self, body: bytes, *, status: bytes = b"HTTP/1.1 200 OK", headers: tuple[bytes, ...] = ()) -> bytes:
        lines = (status, *headers, b"Connection: close", b"Content-Length: %d" % len(body), b"", b"")
        return b"\r\n".join(lines) + body

    def status_line(self) -> bytes:
        code = self.random.choice((*STATUSES, 0, 99, -1, 1000, 10**30))
        lines = (
            f"HTTP/1.1 {code} {self.echoed()}",
            f"HTTP/1.1 {code}",
            f"HTTP/{self.random.choice(('0.9', '1.0', '2', '9.9', 'x'))} {code} OK",
            "",
            "HTTP/1.1",
            "<html>",
            "HTTP/1.1 200 \x1b[31mOK\x00",
            "x" * 200_000,
        )
        return self.response(self.body(), status=self.random.choice(lines).encode("utf-8", "replace"))

    def headers(self) -> bytes:
        length = len(self.body())
        headers = (
            (b"Content-Type: application/json; charset=" + self.random.choice(CHARSETS).encode("latin-1", "replace"),),
            tuple(b"X-%d: y" % number for number in range(self.random.choice((10, 5000)))),
            (b"X: " + b"y" * 200_000,),
            (b"no colon",),
            (b": no name",),
            (b"X: \x00\x01",),
            (b"X: " + self.echoed().encode(),),
            (b"Content-Length: %d" % (length + 5),),
            (b"Content-Length: -1",),
            (b"Content-Length: " + b"9" * 400,),
            (b"Transfer-Encoding: chunked",),
            (b"Transfer-Encoding: gzip, chunked",),
            (b"Set-Cookie: a=" + self.echoed().encode(), b"Set-Cookie: ;;;=\xff", b"Set-Cookie: a; Expires=never"),
            (b"Connection: upgrade", b"Upgrade: h2c"),
            (b" folded: yes", b"\tmore"),
        )
        return self.response(self.body(), headers=self.random.choice(headers))

    def encoding(self) -> bytes:
        body = self.body()
        choices = (
            (b"gzip", gzip.compress(body, mtime=0)),
            (b"gzip", gzip.compress(body, mtime=0)[:-9]),
            (b"gzip", body),
            (b"gzip", gzip.compress(bytes(30_000_000), compresslevel=1, mtime=0)),
            (b"gzip", gzip.compress(gzip.compress(body, mtime=0), mtime=0)),
            (b"gzip, gzip", gzip.compress(gzip.compress(body, mtime=0), mtime=0)),
            (b"deflate", zlib.compress(body)[2:-4]),
            (b"deflate", zlib.compress(bytes(30_000_000), 1)),
            (b"br", body),
            (b"zstd", body),
            (b"identity, identity", body),
            (b"\x1b[31m" + self.echoed().encode("latin-1", "replace"), body),
            (b"gzip, " * 1000, body),
        )
        encoding, packed = self.random.choice(choices)
        return self.response(packed, headers=(b"Content-Encoding: " + encoding,))

    def chunks(self) -> bytes:
        body = self.body()
        single = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        choices = (
            single,
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
            b"%x;name=value\r\n%s\r\n0\r\nTrailer: %s\r\n\r\n" % (len(body), body, self.echoed().encode()),
            b"%x\r\n%s\r\n" % (len(body) + 10, body),
            b"-5\r\n%s\r\n0\r\n\r\n" % body,
            b"f" * 300 + b"\r\n" + body,
            b"zz\r\n%s" % body,
            b"1\r\n \r\n" * 60_000 + b"0\r\n\r\n",
            b"",
        )
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        return head + self.random.choice(choices)

    def cut(self) -> bytes:
        whole = self.response(self.body())
        return whole[: self.random.randrange(len(whole))]

    def json(self) -> bytes:
        """Return a response with one to three of its values removed, replaced or repeated."""
        made = self.good()
        for _ in range(self.random.randint(1, 3)):
            places = list(holders(made))
            holder, name = self.random.choice(places)
            change = self.random.choice(("out", "odd", "odd", "text", "copy"))
            if change == "out":
                del holder[name]
            elif change == "copy":
                holder[name] = [copy.deepcopy(holder[name])] * 3
            else:
                # A copy, since a later mutation may put the same value into it.
                holder[name] = self.text() if change == "text" else copy.deepcopy(self.random.choice(ODD_VALUES))
        return self.response(json.dumps(made).encode())

    def values(self) -> bytes:
        """Return a response with an odd answer, reason or count."""
        made = self.good()
        choice = made["choices"][0]
        text = self.random.choice((self.text(), self.text(), *ODD_VALUES))
        choice |= {"message": {"role": "assistant", "content": text}, "text": text}
        choice["finish_reason"] = self.random.choice(("stop", "length", "content_filter", None, {}, self.echoed()))
        made["usage"]["completion_tokens"] = self.random.choice(ODD_VALUES)
        choice["logprobs"]["content"][0]["logprob"] = self.random.choice((-0.5, *ODD_VALUES))
        return self.response(json.dumps(made).encode())

    def nesting(self) -> bytes:
        depth = self.random.choice((100, 900, 990, 5000, 1_000_000))
        opened, closed = self.random.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"[[],", b"]")))
        deep = opened * depth + self.random.choice((b"1" + closed * depth, b""))
        wrapped = (deep, b'{"choices":%s}' % deep, b'{"choices":[{"message":{"content":%s}}]}' % deep)
        status = self.random.choice((b"HTTP/1.1 200 OK", b"HTTP/1.1 400 no", b"HTTP/1.1 500 no"))
        return self.response(self.random.choice(wrapped), status=status)

    def bytes(self) -> bytes:
        body = self.body()
        noise = self.random.randbytes(self.random.choice((1, 20, 1000)))
        place = self.random.randrange(len(body))
        choices = (
            noise,
            body[:place] + noise + body[place:],
            b"\xef\xbb\xbf" + body,
            body.decode().encode("utf-16"),
            body.decode().encode("utf-32"),
            body.replace(b"fine", b"\xff\xfe"),
            body.replace(b"fine", b"\\ud800\\u0000"),
            body + body,
            b"[" + b'{"":0},' * 2_000_000 + b"0]",
            b"[" + b"[[]]," * 3_000_000 + b"0]",
            b"[" + b"1e1," * 4_000_000 + b"0]",
            b" " * 17_000_000,
        )
        return self.response(self.random.choice(choices))

    def redirect(self) -> bytes:
        places = (
            f"http://elsewhere/v1?key={self.echoed()}",
            f"http://{quote(KEY, safe='')}.example.com/v1",
            f"http://user:{quote(KEY, safe='')}@elsewhere/",
            "//",
            "http://[::1",
            "http://x:99999999/",
            "\x1b[31m",
            "javascript:alert(1)",
            "http://x/" + "y" * 50_000,
            "",
        )
        code = self.random.choice((300, 301, 302, 303, 304, 307, 308))
        place = self.random.choice(places).encode("utf-8", "replace")
        return self.response(b"", status=b"HTTP/1.1 %d away" % code, headers=(b"Location: " + place,))

    def echo(self) -> bytes:
        """Return a response with the key somewhere in a long text: in an answer, an error or neither."""
        text = "#" * self.random.choice((0, 1, 10, 470, 485, 495, 499)) + self.echoed() + "#" * 600
        made = self.good()
        made["choices"][0] |= {"message": {"role": "assistant", "content": text}, "text": text}
        choices = (
            self.response(json.dumps(made).encode()),
            self.response(json.dumps(made).encode()),
            self.response(json.dumps({"error": {"message": text}}).encode(), status=b"HTTP/1.1 400 no"),
            self.response(json.dumps({"error": text}).encode(), status=b"HTTP/1.1 503 no"),
            self.response(json.dumps({"detail": [{"got": text}]}).encode(), status=b"HTTP/1.1 422 no"),
            self.response(text.encode(), status=b"HTTP/1.1 401 no"),
            self.response(text.encode()),
            self.response(json.dumps({"key": text}).encode()),
        )
        return self.random.choice(choices)

    def error(self) -> bytes:
        """Return an error with an odd message and an odd Retry-After header."""
        status = b"HTTP/1.1 %d no" % self.random.choice(STATUSES)
        wait = self.random.choice(
            (b"nan", b"inf", b"-5", b"1e309", b"9" * 400, b"0", b"soon", b"Mon, 99 Foo 0000", b"")
        )
        message = self.random.choice((self.text(), *ODD_VALUES))
        made = self.random.choice(({"error": {"message": message, "code": message}}, {"error": message}, message))
        return self.response(json.dumps(made).encode(), status=status, headers=(b"Retry-After: " + wait,))

    def flips(self) -> bytes:
        whole = bytearray(self.response(self.body()))
        for _ in range(self.random.randint(1, 8)):
            whole[self.random.randrange(len(whole))] ^= 1 << self.random.randrange(8)
        return bytes(whole)

    def slow(self) -> tuple[bytes, ...]:
        """Return a response that is sent in pieces; the server waits before each empty one."""
        whole = self.response(self.body())
        places = sorted(self.random.sample(range(len(whole)), 3))
        parts = [whole[first:last] for first, last in zip([0, *places], [*places, len(whole)], strict=True)]
        pauses = self.random.choice((1, 1, 1, 1, 1, 150))
        return tuple(part for piece in parts for part in (*[b""] * pauses, piece))


def holders(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a JSON value: its container and its name or index there."""
    if isinstance(value, dict | list):
        for name, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, name
            yield from holders(inner)
