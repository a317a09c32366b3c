"""The HTTP application: routes of the OpenAI API, `/predict` for rows, health and metrics."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from partita.data.formats.json import repeated_key
from partita.runs.files import without_infinities
from partita.serving.answers import AsyncEngine
from partita.serving.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    EmbeddingsBody,
    PredictBody,
    TokenizeBody,
    why_refused,
)
from partita.serving.engine import ServingEngine
from partita.serving.errors import NO_COLUMN, OTHER_MODEL, ApiError
from partita.serving.guard import RequestGuard
from partita.serving.limits import ServerLimits
from partita.serving.metrics import ServerMetrics
from partita.serving.openai_chats import ChatAnswers
from partita.serving.openai_completions import CompletionAnswers
from partita.serving.openai_embeddings import embeddings
from partita.serving.openai_requests import EngineRequests
from partita.serving.rows import RowService, record_fields
from partita_schema.errors import DataError, JobError, PartitaError

logger = logging.getLogger(__name__)

UI = Path(__file__).parent / "ui"
CONTENT_POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

AnyBody = TypeVar("AnyBody", bound=Body)


@dataclass
class ServerState:
    """What the routes share."""

    engine: ServingEngine
    name: str
    """Name of the model for clients."""
    created: int
    """When the server started, in seconds since 1970."""
    token: str | None = None
    """Token that requests must carry; None for none."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    ui: bool = False
    """Whether the page for a browser is served."""


class Api:
    """The routes."""

    def __init__(self, state: ServerState) -> None:
        self.state, engine = state, state.engine
        self.engine = AsyncEngine(engine, max_seconds=state.limits.answer_seconds)
        self.rows = RowService(self.engine)
        requests = EngineRequests(engine)
        self.chats = ChatAnswers(self.engine, requests, model=state.name)
        self.texts = CompletionAnswers(self.engine, requests, model=state.name)
        self.metrics = ServerMetrics(engine)
        self._describing = threading.Lock()

    async def models(self, request: Request) -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Return the model by its name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        state = self.state
        return {
            "id": state.name,
            "object": "model",
            "created": state.created,
            "owned_by": "partita",
            "max_model_len": state.engine.context_tokens,
            "default_max_tokens": min(state.engine.default_new_tokens, state.engine.context_tokens),
            "chat": state.engine.prompts.why_none is None,
        }

    async def chat(self, request: Request) -> Response:
        """Answer the messages of a chat."""
        body = await self._body(request, ChatBody)
        self._check_model(body.model)
        return await self._unless_gone(request, self.chats.chat(body))

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        body = await self._body(request, CompletionBody)
        self._check_model(body.model)
        return await self._unless_gone(request, self.texts.completions(body))

    async def predict(self, request: Request) -> Response:
        """Answer rows as `predict` does. GET returns the hashes and settings that determine the answers."""
        if request.method == "GET":
            limits = {"max_body_bytes": self.state.limits.body_bytes}
            return JSONResponse(await asyncio.to_thread(self._description) | limits)
        body = await self._body(request, PredictBody)
        if body.fingerprint is not None:
            found = (await asyncio.to_thread(self._description))["fingerprint"]
            if found != body.fingerprint:
                message = f"the rows are for the model {body.fingerprint}, and this server has {found}"
                raise ApiError(400, message, param="fingerprint", code=OTHER_MODEL)
        try:
            rows = self.rows.open(body.rows, body.keys)
        except DataError as error:
            raise ApiError(400, str(error), param="rows", code=NO_COLUMN) from None
        return await self._unless_gone(request, self._predictions(body, rows))

    def _description(self) -> dict[str, Any]:
        """Return what determines the answers to rows; the first call computes the fingerprint of the model."""
        with self._describing:
            return self.rows.description

    async def _predictions(self, body: PredictBody, rows: Any) -> Response:
        answers = await self.rows.answers(rows)
        if body.records:
            return JSONResponse(without_infinities({"records": [record_fields(answer) for answer in answers]}))
        return JSONResponse(without_infinities({"predictions": self.rows.predictions(rows, answers)}))

    async def embeddings(self, request: Request) -> Response:
        """Return embeddings of texts."""
        body = await self._body(request, EmbeddingsBody)
        self._check_model(body.model)
        return await self._unless_gone(request, embeddings(body, self.rows, model=self.state.name))

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of the prompt of a chat."""
        body = await self._body(request, TokenizeBody)
        self._check_model(body.model)
        return JSONResponse(await asyncio.to_thread(self._tokens, body))

    def _tokens(self, body: TokenizeBody) -> dict[str, Any]:
        core = self.state.engine
        if body.messages is not None:
            ids = core.prompts.encode(body.messages)
        else:
            ids = core.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens, verbose=False)["input_ids"]
        texts = [core.tokenizer.decode([token]) for token in ids]
        return {"count": len(ids), "max_model_len": core.context_tokens, "tokens": ids, "token_strs": texts}

    async def health(self, request: Request) -> Response:
        """Return whether requests are accepted."""
        reason = self.state.engine.why_closed
        if reason is not None:
            return JSONResponse({"status": "stopping", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def prometheus(self, request: Request) -> Response:
        """Return the metrics as Prometheus reads them."""
        return PlainTextResponse(self.metrics.text(), media_type=self.metrics.media_type)

    async def _body(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        """Return the body of a request. Raise ApiError if it is not valid."""
        content = await request.body()
        try:
            body = kind.model_validate_json(content)
        except ValidationError as error:
            reason, param = why_refused(error, content)
            raise ApiError(400, reason, param=param) from None
        repeated = repeated_key(content)
        if repeated is not None:
            raise ApiError(400, repeated)
        return body

    def _check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model."""
        if name not in (None, self.state.name):
            raise ApiError(
                404, f"no model is named {name!r}; this server has {self.state.name!r}", code="model_not_found"
            )

    async def _unless_gone(self, request: Request, work: Awaitable[Response]) -> Response:
        """Return the response, or cancel the work if the client closes the connection."""
        task = asyncio.ensure_future(work)
        gone = asyncio.create_task(until_gone(request))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                raise ClientDisconnect
            return task.result()
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()


async def until_gone(request: Request) -> None:
    """Return once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def refused(request: Request, error: Exception) -> Response:
    """Return the response to a refused request."""
    assert isinstance(error, ApiError)
    return error.response()


async def refused_by_partita(request: Request, error: Exception) -> Response:
    """Return the response to a request that names what the model cannot do, or that is invalid."""
    if isinstance(error, JobError):
        logger.error("a request failed: %s", error)
        return ApiError(500, str(error)).response()
    return ApiError(400, str(error)).response()


async def not_found(request: Request, error: Exception) -> Response:
    """Return the response to a request for a path or method that does not exist."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, dict(error.headers or {})
    if error.status_code == 405:
        allowed = sorted(headers["Allow"].split(", "))
        message = f"{request.method} is not for {path}; send {' or '.join(allowed)}"
        headers["Allow"] = ", ".join(allowed)
    else:
        message = f"there is nothing at {path}; GET /v1/models, POST /v1/chat/completions or /predict"
    response = ApiError(error.status_code, message).response()
    response.headers.update(headers)
    return response


async def gone(request: Request, error: Exception) -> Response:
    """Return an empty response to a client that has closed its connection."""
    return Response(status_code=499)


async def failed(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed without a fault of the client."""
    return ApiError(500, "the server failed; its log says why").response()


HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: refused,
    PartitaError: refused_by_partita,
    HTTPException: not_found,
    ClientDisconnect: gone,
    Exception: failed,
}


class UiFiles(StaticFiles):
    """The files of the page, with a content policy that allows no others."""

    async def get_response(self, path: str, scope: Any) -> Response:
        """Return a file."""
        response = await super().get_response(path, scope)
        response.headers["Content-Security-Policy"] = CONTENT_POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response


def make_app(state: ServerState) -> Any:
    """Return the ASGI application of a server."""
    api = Api(state)
    routes = [
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
        Route("/predict", api.predict, methods=["GET", "POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/health", api.health),
        Route("/metrics", api.prometheus),
    ]
    if state.ui:
        files = UiFiles(directory=UI, html=True)
        # A route for each file: a mount at / would also answer requests to the routes above with another method.
        paths = ["/", *(f"/{file.name}" for file in UI.iterdir())]
        routes += [Route(path, files, methods=["GET"]) for path in paths]
    app = Starlette(routes=routes, exception_handlers=dict(HANDLERS))
    public = ("/health",) if not state.ui else ("/health", "/")
    return RequestGuard(app, token=state.token, limits=state.limits, metrics=api.metrics, public=public)
