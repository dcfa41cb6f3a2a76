"""The routes. Each one: who asks, what is asked, do it. Limits, errors and headers are in the rooms beside."""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import FileResponse, JSONResponse, Response

from openwafer.errors import UserError
from openwafer.serve.api.body import Receive, parse_body, read_body, skip_body
from openwafer.serve.api.chat import ChatJob, plan_chat
from openwafer.serve.api.completions import CompletionJob, plan_completion
from openwafer.serve.api.conversation import render
from openwafer.serve.api.errors import ApiError, stopping
from openwafer.serve.api.frontdoor import FrontDoor
from openwafer.serve.api.limits import Client
from openwafer.serve.api.openapi import describe
from openwafer.serve.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, NewKey, TokenizeRequest
from openwafer.serve.api.service import Service
from openwafer.serve.keys import Key

M = TypeVar("M", bound=BaseModel)

WEB = Path(__file__).parent.parent / "web"
# Rendering and encoding a prompt of this many bytes takes about a millisecond; longer ones go to a thread.
_SMALL_BODY = 4096
_SMALL_JSON = 64 << 10  # the same for parsing and checking alone
_STATUS = ("/health", "/metrics")  # can be asked to the very end
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def make_app(service: Service) -> FrontDoor:
    """The whole HTTP side, for uvicorn."""
    app = FastAPI(title="openwafer", version="1", docs_url=None, redoc_url=None)
    _add_completions(app, service)
    _add_models(app, service)
    _add_tokens(app, service)
    _add_status(app, service)
    _add_console(app, service)
    _add_pages(app)
    app.openapi = lambda: describe(app)  # pyright: ignore[reportAttributeAccessIssue]
    app.add_exception_handler(ApiError, _error_response)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _our_fault)
    return FrontDoor(app, lambda host, path, receive: _admit(service, host, path, receive))


async def _admit(service: Service, host: str, path: str, receive: Receive) -> None:
    if not service.needs_key and not _is_local(host):
        raise ApiError(403, "this server has no API keys and answers to localhost only: see openwafer keys")
    if service.state == "stopping" and path not in _STATUS:
        await skip_body(receive, service.config.body_timeout_s)
        raise stopping()


def _is_local(host: str) -> bool:
    """A site that points its own name at 127.0.0.1 still sends that name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]").lower() in _LOOPBACK


def _visit(request: Request) -> Any:
    return request.scope["openwafer.visit"]


def _authorize(service: Service, request: Request) -> Client:
    client = service.client(request.headers.get("authorization", ""))
    _visit(request).client = client
    return client


def _authorize_admin(service: Service, request: Request) -> Client:
    client = _authorize(service, request)
    if not client.is_admin:
        raise ApiError(403, "this needs an admin key: see `openwafer keys create --admin`")
    return client


async def _parsed(service: Service, request: Request, model: type[M]) -> tuple[M, int]:
    """The body and its size."""
    body = await read_body(
        request.receive, request.headers, service.config.max_body_size, service.config.body_timeout_s
    )
    parsed = parse_body(model, body) if len(body) <= _SMALL_JSON else await asyncio.to_thread(parse_body, model, body)
    return parsed, len(body)


async def _call(size: int, function: Any, *args: Any) -> Any:
    """Here when it is quick, else in a thread, so that other streams go on."""
    return function(*args) if size <= _SMALL_BODY else await asyncio.to_thread(function, *args)


def _add_completions(app: FastAPI, service: Service) -> None:
    async def complete(request: Request, model: type[M], job_class: Any, plan: Any) -> Response:
        client = _authorize(service, request)
        client.take_request()
        body, size = await _parsed(service, request, model)
        served = service.model(body.model)  # pyright: ignore[reportAttributeAccessIssue]
        unique_id = _visit(request).unique_id
        # A grammar may take long to compile, however short the request.
        is_slow = any(getattr(body, name, None) is not None for name in ("response_format", "tools"))
        planned = await _call(_SMALL_BODY + 1 if is_slow else size, plan, served, body, unique_id, client.id)
        job = job_class(service, served, client, body, unique_id, request.headers.get("user-agent", ""))
        job.start(planned)
        if body.stream:  # pyright: ignore[reportAttributeAccessIssue]
            return await job.first(request.receive)
        return await job.whole(request.receive)

    @app.post("/v1/chat/completions", tags=["completions"])
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        return await complete(request, ChatRequest, ChatJob, plan_chat)

    @app.post("/v1/completions", tags=["completions"])
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await complete(request, CompletionRequest, CompletionJob, plan_completion)


def _add_models(app: FastAPI, service: Service) -> None:
    def described(name: str) -> dict[str, Any]:
        created = service.served.created if service.served is not None else int(time.time())
        return {"id": name, "object": "model", "created": created, "owned_by": "openwafer"}

    @app.get("/v1/models", tags=["models"])
    async def models(request: Request) -> JSONResponse:
        """What is served here."""
        _authorize(service, request)
        return JSONResponse({"object": "list", "data": [described(name) for name in service.model_names]})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def one_model(request: Request, name: str) -> JSONResponse:
        """One model by its name."""
        _authorize(service, request)
        if name not in service.model_names:
            raise ApiError(404, f"there is no model {name[:100]!r} here", param="model", code="model_not_found")
        return JSONResponse(described(name))

    @app.get("/v1/tcp_warming", tags=["models"])
    async def tcp_warming() -> JSONResponse:
        """Opens a connection before it is needed."""
        return JSONResponse({"status": "ok"})


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(request: Request) -> JSONResponse:
        """The tokens of a text or conversation."""
        _authorize(service, request)
        body, size = await _parsed(service, request, TokenizeRequest)
        served = service.model(body.model)

        def work() -> list[int]:
            text = body.prompt if body.messages is None else render(served, body.messages)
            add_special = bool(body.add_special_tokens if body.add_special_tokens is not None else body.prompt)
            try:
                return served.tokenizer.encode(text or "", add_special=add_special)
            except UserError as error:
                raise ApiError(400, str(error), param="prompt") from None

        tokens = await _call(size, work)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": served.engine.max_context})

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(request: Request) -> JSONResponse:
        """The text of tokens."""
        _authorize(service, request)
        body, size = await _parsed(service, request, DetokenizeRequest)
        served = service.model(body.model)
        if body.tokens and max(body.tokens) >= served.engine.vocab_size:
            raise ApiError(400, f"tokens: {max(body.tokens)} is not a token id of this model", param="tokens")
        text = await _call(size, served.tokenizer.decode, body.tokens, False)
        return JSONResponse({"prompt": text})


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["status"])
    async def health() -> JSONResponse:
        """200 when requests are being answered."""
        status, body = service.health()
        return JSONResponse(body, status_code=status)

    @app.get("/metrics", tags=["status"])
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_console(app: FastAPI, service: Service) -> None:
    @app.get("/console/status", tags=["console"])
    async def status(request: Request) -> JSONResponse:
        """Whether a key is needed, and whether the one that was sent may administrate."""
        try:
            client = _authorize(service, request)
        except ApiError:
            return JSONResponse({"needs_key": True, "is_admin": False, "has_access": False})
        return JSONResponse({"needs_key": service.needs_key, "is_admin": client.is_admin, "has_access": True})

    @app.get("/console/keys", tags=["console"])
    async def list_keys(request: Request) -> JSONResponse:
        """All keys, without their secrets."""
        _authorize_admin(service, request)
        return JSONResponse({"keys": [{**_key_json(key), **_left(service, key)} for key in service.store.all()]})

    @app.post("/console/keys", tags=["console"])
    async def create_key(request: Request) -> JSONResponse:
        """A new key; its secret is in this response and nowhere else."""
        _authorize_admin(service, request)
        body, _ = await _parsed(service, request, NewKey)
        key, secret = service.store.create(
            body.name,
            requests_per_day=body.requests_per_day,
            tokens_per_minute=body.tokens_per_minute,
            is_admin=bool(body.is_admin),
        )
        return JSONResponse({**_key_json(key), "secret": secret})

    @app.delete("/console/keys/{key_id}", tags=["console"])
    async def revoke_key(request: Request, key_id: str) -> JSONResponse:
        """From now on the key is refused."""
        _authorize_admin(service, request)
        try:
            return JSONResponse(_key_json(service.store.revoke(key_id)))
        except UserError as error:
            raise ApiError(404, str(error)) from None

    @app.get("/console/usage", tags=["console"])
    async def usage(request: Request, days: str = "30") -> JSONResponse:
        """Requests and tokens per key, model and day."""
        _authorize_admin(service, request)
        if not (days.isascii() and days.isdigit() and 1 <= int(days) <= 366):
            raise ApiError(400, f"days must be 1 to 366, got {days[:20]!r}", param="days")
        since = time.strftime("%Y-%m-%d", time.gmtime(time.time() - (int(days) - 1) * 86400))
        return JSONResponse({"usage": [asdict(row) for row in service.usage_rows(since)]})

    @app.get("/console/requests", tags=["console"])
    async def requests(request: Request) -> JSONResponse:
        """The last finished requests, newest first."""
        _authorize_admin(service, request)
        return JSONResponse({"requests": [asdict(recent) for recent in reversed(service.recent)]})


def _key_json(key: Key) -> Mapping[str, Any]:
    return asdict(key)


def _left(service: Service, key: Key) -> Mapping[str, Any]:
    """What is left of a key's limits right now."""
    client = service.clients.of_key(key)
    buckets = {"requests_left": client.requests, "tokens_left": client.tokens}
    return {name: None if bucket is None else math.floor(bucket.level) for name, bucket in buckets.items()}


def _add_pages(app: FastAPI) -> None:
    for path, file in {"/": "chat.html", "/playground": "playground.html", "/console": "console.html"}.items():
        _add_page(app, path, file)
    _add_page(app, "/docs", "docs.html")
    # Only files that are there now can be asked for: no path of a client ever reaches the file system.
    for file in sorted(WEB.glob("*.*")):
        if file.suffix in (".js", ".css", ".svg"):
            _add_page(app, f"/web/{file.name}", file.name)


def _add_page(app: FastAPI, path: str, file: str) -> None:
    @app.get(path, include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(WEB / file, headers={"cache-control": "no-cache"})


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    headers = dict(error.headers)
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not wanted
    return JSONResponse(error.as_json(), status_code=error.status, headers=headers)


async def _our_fault(request: Request, error: Exception) -> JSONResponse:
    """The front door writes the log."""
    answer = ApiError(500, f"the server failed on this request; its log has the id {_visit(request).request_id}")
    return JSONResponse(answer.as_json(), status_code=500)


def _nothing_at(path: str) -> str:
    """With the fix for what clients get wrong most: some add /v1 to their base URL themselves, some do not."""
    text = f"there is nothing at {path[:100]}"
    if path.startswith("/v1/v1/"):
        return f"{text}: the client adds /v1 itself, so leave it out of its base URL"
    if path in ("/chat/completions", "/completions", "/models"):
        return f"{text}, but there is at /v1{path}: end the client's base URL with /v1"
    return text


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    texts = {404: _nothing_at(request.url.path), 405: f"{request.method} is not allowed here"}
    answer = ApiError(error.status_code, texts.get(error.status_code, str(error.detail)))
    return JSONResponse(answer.as_json(), status_code=error.status_code, headers=error.headers)
