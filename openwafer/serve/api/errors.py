"""What goes wrong, in the shape that OpenAI clients read: `{"error": {message, type, param, code}}`."""

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    503: "unavailable",
}


class ApiError(Exception):
    """An answer that is not 200; `message` is shown to the user."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status, "server_error")
        self.headers = headers or {}

    def as_json(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def busy(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    """503 that a client may try again."""
    return ApiError(503, message, code=code, headers={"retry-after": str(retry_after_s), "x-should-retry": "true"})


def stopping() -> ApiError:
    """The connection is closed, too: the next one may lead to another server."""
    error = busy("the server is shutting down: try again elsewhere or later", "stopping", retry_after_s=5)
    error.headers["connection"] = "close"
    return error
