"""Around every request: an id, headers that all responses have, one log line, and an answer when all else fails."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from openwafer.serve.api.body import Disconnected, Receive
from openwafer.serve.api.errors import ApiError, stopping
from openwafer.serve.api.limits import NOBODY, Client
from openwafer.serve.api.wire import to_json

log = logging.getLogger("openwafer.serve")

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
# Pages are ours alone: nothing from elsewhere, in nobody's frame.
_SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; style-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
]


def _new_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def _common(request_id: str, client: Client) -> list[tuple[bytes, bytes]]:
    return [(b"x-request-id", request_id.encode()), *client.headers(), *_SECURITY]


def not_http() -> bytes:
    """The whole response to bytes that are no request: it never gets as far as the door."""
    request_id = _new_id()
    log.info("request", extra={"fields": {"request_id": request_id, "status": 400, "error": "not HTTP"}})
    body = to_json(ApiError(400, "this is not an HTTP request that can be understood").as_json())
    first = [b"HTTP/1.1 400 Bad Request", b"content-type: application/json", b"connection: close"]
    headers = [(b"content-length", b"%d" % len(body)), *_common(request_id, NOBODY)]
    return b"\r\n".join([*first, *(name + b": " + value for name, value in headers), b"", body])


class FrontDoor:
    """The outermost ASGI layer. `admit` is given the Host header, the path and the body to come, and raises an
    ApiError for whom it sends away.
    """

    def __init__(self, app: App, admit: Callable[[str, str, Receive], Awaitable[None]]) -> None:
        self._app = app
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = _Visit(scope, send)
        scope["openwafer.visit"] = visit
        try:
            await self._admit(visit.header(b"host").decode("latin-1"), scope["path"], receive)
            await self._app(scope, receive, visit.send)
        except Disconnected:
            visit.status = visit.status or 499
        except ApiError as error:
            await visit.fail(error)
        except asyncio.CancelledError:  # the server ends before this request does
            await visit.fail(stopping())
        except Exception:  # the last resort of a server: say 500, keep serving
            log.exception("a request failed", extra={"fields": {"request_id": visit.request_id}})
            await visit.fail(ApiError(500, f"the server failed on this request; its log has the id {visit.request_id}"))
        finally:
            visit.write_log()


class _Visit:
    """One request as the front door sees it; `client` is set by whoever finds out."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._began = time.monotonic()
        given = self.header(b"x-request-id")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else _new_id()
        # Ids within the engine must be unique, whatever clients send.
        self.unique_id = uuid.uuid4().hex
        self.client: Client = NOBODY
        self.status = 0

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self._scope["headers"] if key == name), b"")

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *_common(self.request_id, self.client)]
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """An error response, unless another one has begun."""
        if self.status:
            return
        body = to_json(error.as_json())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        if error.status in (408, 413):
            headers.append((b"connection", b"close"))  # the rest of the body is not wanted
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def write_log(self) -> None:
        # The query is left out: people put secrets there.
        fields = {
            "request_id": self.request_id,
            "method": self._scope["method"],
            "path": self._scope["path"][:200],
            "status": self.status,
            "seconds": round(time.monotonic() - self._began, 4),
            "client": self.client.id,
        }
        # Whoever watches the server asks every few seconds, which is no news.
        level = logging.DEBUG if fields["path"] in ("/health", "/metrics") else logging.INFO
        log.log(level, "request", extra={"fields": fields})
