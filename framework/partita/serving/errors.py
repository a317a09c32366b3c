"""Errors of requests, as the OpenAI API writes them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
RETRY_SECONDS = "1"
OTHER_MODEL = "other_model"
"""Code of the error of rows that are for another model."""
NO_COLUMN = "missing_column"
"""Code of the error of rows that lack a column."""


class ApiError(Exception):
    """A request that is refused, with the status and the sentence of the response."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Describe the response.

        Args:
            status: Status of HTTP.
            message: What is wrong, and what to send instead.
            param: The key of the body that is wrong.
            code: A name of the error for programs.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def content(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> "JSONResponse":
        """Return the response."""
        from starlette.responses import JSONResponse  # clients of a server import this file without the extra

        headers = {"Retry-After": RETRY_SECONDS} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.content, status_code=self.status, headers=headers)
