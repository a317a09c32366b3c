"""Requests with rows, and the records in their responses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from partita.backends.endpoint.protocol import AnswerError, error_message, parse_response
from partita.backends.endpoint.receiving import Response
from partita.backends.endpoint.request_sender import RequestFailure, RequestSender, refusal
from partita.generation.requests import RowResult
from partita.lm.base import Generated


class Record(BaseModel):
    """The answer to a row."""

    model_config = ConfigDict(strict=True)

    status: Literal["ok", "error", "skipped"]
    text: str | None
    tokens: int
    finish_reason: Literal["stop", "length"] | None
    logprob: float | None
    scores: dict[str, Any] | None
    reward: float | None
    samples: list[dict[str, Any]] | None
    error: str | None

    def result(self, row: int) -> RowResult:
        """Return the result of a row."""
        if self.status != "ok" or self.text is None or self.finish_reason is None:
            return RowResult(row, None, self.error or "the server returned no answer")
        generated = Generated(
            ids=(),
            text=self.text,
            finish_reason=self.finish_reason,
            logprob=self.logprob,
            reported_num_tokens=self.tokens,
            scores=self.scores,
        )
        samples = None if self.samples is None else tuple(self.samples)
        return RowResult(row, generated, reward=self.reward, samples=samples)


class Records(BaseModel):
    """The answers to the rows of a request."""

    records: list[Record]


@dataclass(frozen=True)
class RowFailure(RequestFailure):
    """A failed request with the code of its error."""

    code: str = ""


class RowSender(RequestSender[Records]):
    """Sends requests with rows."""

    @property
    def path(self) -> str:
        """Path of the API after the server's address."""
        return "/predict"

    def read(self, response: Response, body: Mapping[str, Any]) -> Records:
        """Return the answers. Raise AnswerError if there is not one for each row."""
        try:
            found = Records.model_validate(parse_response(response.body))
        except ValidationError as error:
            raise AnswerError(f"the server's response holds no records: {error.errors()[0]['msg']}") from None
        if len(found.records) != len(body["rows"]):
            raise AnswerError(f"the server answered {len(found.records):,} of {len(body['rows']):,} rows")
        return found

    def num_tokens(self, reply: Records) -> int:
        """Return 0: tokens per minute are not limited."""
        return 0

    def failure(self, response: Response, body: Mapping[str, Any]) -> RequestFailure:
        """Return the failure described by a response without an answer.

        Rows that are too many for the server, or for the time of an answer, are not sent again together.

        Args:
            response: The response.
            body: The body of the request.
        """
        message, code = error_message(response.text)
        if response.status == 400:
            return RowFailure("row", message, 400, code=code)
        if response.status == 504:
            return RowFailure("row", f"the server failed (504): {message}", 504)
        failure = refusal(response)
        return replace(failure, retry=False) if response.status == 429 and len(body["rows"]) > 1 else failure
