"""The body of a request: read within limits of size and time, unpacked, parsed, and checked."""

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from openwafer.serve.api.errors import ApiError

M = TypeVar("M", bound=BaseModel)
Receive = Callable[[], Awaitable[Mapping[str, Any]]]


class Disconnected(Exception):
    """The client has gone before its request was whole."""


async def read_body(receive: Receive, headers: Mapping[str, str], max_bytes: int, timeout_s: float) -> bytes:
    """The unpacked body. 413 when it is too large, 408 when it does not arrive, 415 for what we cannot unpack."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps other sites' forms from posting here through a visitor's browser.
        raise ApiError(415, f"content-type must be application/json, got {kind[:60]!r}")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _collect(receive, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the request's body did not arrive within {timeout_s:g} s") from None
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding == "gzip":
        return _unzip(body, max_bytes)
    raise ApiError(415, f"content-encoding must be gzip or identity, got {encoding[:60]!r}")


async def _collect(receive: Receive, max_bytes: int) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def skip_body(receive: Receive, timeout_s: float) -> None:
    """Read what nobody wants: a client that is hung up on while it still sends does not see our answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while (message := await receive()).get("more_body", False):
                pass
            if message["type"] == "http.disconnect":
                raise Disconnected


def _unzip(body: bytes, max_bytes: int) -> bytes:
    """A small body can unpack to anything: stop at the limit."""
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        text = unpacker.decompress(body, max_bytes + 1)
    except zlib.error:
        raise ApiError(400, "the body is not gzip, as content-encoding says") from None
    if len(text) > max_bytes:
        raise _too_large(max_bytes)
    if not unpacker.eof:
        raise ApiError(400, "the gzip body is cut short")
    return text


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than this server takes ({max_bytes} bytes)")


def parse_body(model: type[M], body: bytes) -> M:
    """`body` as a `model`, or a 400 whose `param` is the field that is wrong."""
    try:
        # Refuses what is not UTF-8, and what is nested deeper than 200 levels.
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _invalid(error, value) from None


def _invalid(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """The most precise mistake in words; pydantic's own texts say what is allowed."""
    mistakes = error.errors(include_url=False, include_context=False, include_input=True)
    # A value that may be one of several things has one complaint for each: the deepest came furthest.
    # Of those, a wrong value says more than a wrong type.
    found = [(_path(m["loc"], body, m["type"] in ("missing", "extra_forbidden")), m) for m in mistakes]
    path, first = max(found, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type")))
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field: {param}", param=param, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_field")
    shown = repr(first["input"])
    got = f", got {shown}" if len(shown) <= 60 and not isinstance(first["input"], (dict, list)) else ""
    message = first["msg"][:1].lower() + first["msg"][1:]
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{message}{got}", param=param, code="invalid_value")


def _path(location: tuple[int | str, ...], body: Any, last_is_field: bool) -> list[str]:
    """A location without pydantic's names of union members, which no client has written."""
    path, value = [], body
    for number, part in enumerate(location):
        if isinstance(value, dict) and part in value:  # noqa: SIM114 - one branch would hide the types
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif number < len(location) - 1 or not last_is_field:
            continue
        path.append(str(part)[:80])
    return path
