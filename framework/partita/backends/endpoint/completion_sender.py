"""Requests for completions and replies of a chat, as the OpenAI API has them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from partita.backends.endpoint.protocol import PATHS, EndpointReply, Mode, read_reply
from partita.backends.endpoint.receiving import Response
from partita.backends.endpoint.request_sender import RequestSender

logger = logging.getLogger(__name__)


@dataclass
class CompletionSender(RequestSender[EndpointReply]):
    """Sends requests for completions and replies of a chat."""

    mode: Mode
    """Whether prompts are texts or messages."""
    logprobs: bool
    """Whether to request log-probabilities of the answers."""

    @property
    def path(self) -> str:
        """Path of the API after the server's address."""
        return PATHS[self.mode]

    def read(self, response: Response, body: Mapping[str, Any]) -> EndpointReply:
        """Return the answer. Raise AnswerError if there is none."""
        return read_reply(response.body, mode=self.mode, logprobs=self.logprobs, max_tokens=token_limit(body))

    def num_tokens(self, reply: EndpointReply) -> int:
        """Return the tokens of prompt and answer; 0 if the server does not report them."""
        return reply.tokens

    def redacted(self, reply: EndpointReply) -> EndpointReply:
        """Return the reply without the API key, and log once that the server repeats it."""
        text = self.redaction.answer(reply.generated.text)
        if text != reply.generated.text and "key" not in self.warned:
            self.warned.add("key")
            logger.warning("the server repeats the API key in its answers; *** replaces it (logged once)")
        return replace(reply, generated=replace(reply.generated, text=text))


def token_limit(body: Mapping[str, Any]) -> int | None:
    """Return the limit of generated tokens in this request; None if it sets none."""
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if isinstance(body.get(name), int)]
    return max(limits, default=None)
