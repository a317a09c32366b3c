"""One response of a server, read within limits: its size, also decompressed, and the number of its pieces."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

MOST_PIECES = 50_000
"""Pieces of a body; a server that sends byte by byte would keep this process busy with nothing else."""
MEGABYTE = 10**6
ACCEPTED = "gzip, deflate"
"""Encodings of a body that are asked for and read, one at a time."""


class ResponseError(Exception):
    """A response that cannot be read; the text says why."""


@dataclass(frozen=True)
class Response:
    """What a server sent."""

    status: int
    headers: httpx2.Headers
    body: bytes

    @property
    def text(self) -> str:
        """The body as text, whatever it is."""
        return self.body.decode("utf-8", errors="replace")


async def receive(client: httpx2.AsyncClient, url: str, body: Mapping[str, Any], *, max_bytes: int) -> Response:
    """Send a request and read the response.

    Raises ResponseError where it is larger than `max_bytes`, comes in too many pieces or cannot be decompressed, and
    the errors of httpx2.
    """
    async with client.stream("POST", url, json=body, headers={"Accept-Encoding": ACCEPTED}) as response:
        unpack = _unpacker(response.headers.get("content-encoding", ""), max_bytes=max_bytes)
        received, pieces, found = 0, 0, bytearray()
        async for piece in response.aiter_raw():
            received, pieces = received + len(piece), pieces + 1
            found += unpack(piece, max_bytes - len(found))
            if max(received, len(found)) > max_bytes:
                raise _too_large(max_bytes)
            if pieces > MOST_PIECES:
                raise ResponseError(f"the server's response comes in more than {MOST_PIECES:,} pieces")
        return Response(response.status_code, response.headers, bytes(found))


def _too_large(max_bytes: int) -> ResponseError:
    return ResponseError(
        f"the server's response is larger than {max_bytes / MEGABYTE:g} MB; write a larger backend.max_response_mb"
    )


class _Plain:
    def __call__(self, piece: bytes, room: int) -> bytes:
        return piece


class _Zlib:
    """Decompresses piece by piece, never more than there is room for."""

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)  # the header says whether it is gzip or zlib
        self.first = True

    def __call__(self, piece: bytes, room: int) -> bytes:
        try:
            found = self._decompress(piece, room)
        except zlib.error as error:
            raise ResponseError(f"the server's response cannot be decompressed: {error}") from None
        self.first = False
        if self.decompressor.unconsumed_tail:
            raise _too_large(self.max_bytes)
        return found

    def _decompress(self, piece: bytes, room: int) -> bytes:
        try:
            return self.decompressor.decompress(piece, room + 1)
        except zlib.error:
            if not self.first:
                raise
            self.decompressor = zlib.decompressobj(-zlib.MAX_WBITS)  # deflate as some servers understand it
            return self.decompressor.decompress(piece, room + 1)


def _unpacker(encoding: str, *, max_bytes: int) -> _Plain | _Zlib:
    match encoding.strip().lower():
        case "" | "identity":
            return _Plain()
        case "gzip" | "x-gzip" | "deflate":
            return _Zlib(max_bytes=max_bytes)
    raise ResponseError(f"the server's response has the content encoding {encoding!r}, and {ACCEPTED} were asked for")
