"""Read one response of a server within limits on its size, also decompressed, and on the number of its chunks."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

MAX_CHUNKS = 50_000
"""Most chunks of a body; a server that sends single bytes would otherwise keep this process busy."""
MEGABYTE = 10**6
ACCEPTED = "gzip, deflate"
"""Content encodings that are requested and supported, one at a time."""


class ResponseError(Exception):
    """A response that cannot be read; the text says why."""


@dataclass(frozen=True)
class Response:
    """A response of the server."""

    status: int
    headers: httpx2.Headers
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; invalid bytes are replaced."""
        return self.body.decode("utf-8", errors="replace")


async def receive(client: httpx2.AsyncClient, url: str, body: Mapping[str, Any], *, max_bytes: int) -> Response:
    """Send a request and read the response.

    Args:
        client: The HTTP client.
        url: Address of the API.
        body: JSON of the request.
        max_bytes: Limit of the response, also decompressed.

    Raises:
        ResponseError: The response is too large, comes in too many chunks, or cannot be decompressed.
        httpx2.RequestError: The request failed.
    """
    async with client.stream("POST", url, json=body, headers={"Accept-Encoding": ACCEPTED}) as response:
        unpack = _unpacker(response.headers.get("content-encoding", ""), max_bytes=max_bytes)
        received, chunks, data = 0, 0, bytearray()
        async for chunk in response.aiter_raw():
            received, chunks = received + len(chunk), chunks + 1
            data += unpack(chunk, max_bytes - len(data))
            if max(received, len(data)) > max_bytes:
                raise _too_large(max_bytes)
            if chunks > MAX_CHUNKS:
                raise ResponseError(f"the server's response comes in more than {MAX_CHUNKS:,} chunks")
        return Response(response.status_code, response.headers, bytes(data))


def _too_large(max_bytes: int) -> ResponseError:
    return ResponseError(
        f"the server's response is larger than {max_bytes / MEGABYTE:g} MB; write a larger backend.max_response_mb"
    )


class _Plain:
    def __call__(self, chunk: bytes, limit: int) -> bytes:
        return chunk


class _Zlib:
    """Decompresses chunk by chunk, never more than `limit` bytes."""

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)  # the header tells gzip from zlib
        self.first = True

    def __call__(self, chunk: bytes, limit: int) -> bytes:
        try:
            data = self._decompress(chunk, limit)
        except zlib.error as error:
            raise ResponseError(f"the server's response cannot be decompressed: {error}") from None
        self.first = False
        if self.decompressor.unconsumed_tail:
            raise _too_large(self.max_bytes)
        return data

    def _decompress(self, chunk: bytes, limit: int) -> bytes:
        try:
            return self.decompressor.decompress(chunk, limit + 1)
        except zlib.error:
            if not self.first:
                raise
            self.decompressor = zlib.decompressobj(-zlib.MAX_WBITS)  # raw deflate, as some servers send it
            return self.decompressor.decompress(chunk, limit + 1)


def _unpacker(encoding: str, *, max_bytes: int) -> _Plain | _Zlib:
    match encoding.strip().lower():
        case "" | "identity":
            return _Plain()
        case "gzip" | "x-gzip" | "deflate":
            return _Zlib(max_bytes=max_bytes)
    raise ResponseError(f"the server's response has the content encoding {encoding!r}, and {ACCEPTED} were requested")
