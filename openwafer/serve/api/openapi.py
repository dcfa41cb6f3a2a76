"""The OpenAPI document: routes read their bodies themselves, so the schemas are added here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from openwafer.serve.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, NewKey, TokenizeRequest

_BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/console/keys": NewKey,
}
_OPEN = ("/health", "/metrics", "/v1/tcp_warming", "/console/status")
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}


def _answer_schema(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    properties = {
        "id": {"type": "string"},
        "object": {"const": kind},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "system_fingerprint": {"type": "string"},
        "service_tier": {"type": "string"},
        "choices": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "logprobs", "finish_reason", *choice],
                "properties": {
                    "index": {"type": "integer"},
                    "logprobs": {"type": ["object", "null"]},
                    "finish_reason": {"enum": ["stop", "length", "tool_calls", "content_filter"]},
                    **choice,
                },
            },
        },
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
            "additionalProperties": {"anyOf": [{"type": "integer"}, _NUMBERS]},
        },
        "time_info": _NUMBERS,
    }
    return {"type": "object", "required": sorted(set(properties) - {"service_tier"}), "properties": properties}


_ANSWERS = {
    "/v1/chat/completions": (
        "ChatAnswer",
        _answer_schema(
            "chat.completion",
            {
                "message": {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {"role": {"const": "assistant"}},
                }
            },
        ),
    ),
    "/v1/completions": ("CompletionAnswer", _answer_schema("text_completion", {"text": {"type": "string"}})),
}
_STATUSES = {
    "400": "the request is wrong",
    "401": "no valid key",
    "403": "not allowed for this key",
    "404": "no such thing",
    "408": "the body did not arrive",
    "413": "the body is too large",
    "415": "not JSON",
    "429": "over a limit",
    "500": "the server failed",
    "503": "loading, busy or stopping",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document for all routes of `app`; made once."""
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = models_json_schema(
        [(model, "validation") for model in _BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {})
    components["schemas"] = {**definitions["$defs"], "Error": _ERROR_SCHEMA, **dict(_ANSWERS.values())}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation["responses"].pop("422", None)
            for status, text in _STATUSES.items():
                content = {} if path == "/health" else error
                operation["responses"].setdefault(status, {"description": text, **content})
            if path in _ANSWERS:
                schema = {"$ref": f"#/components/schemas/{_ANSWERS[path][0]}"}
                operation["responses"]["200"]["content"] = {
                    "application/json": {"schema": schema},
                    "text/event-stream": {},
                }
            if path == "/metrics":
                operation["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
            if path not in _OPEN:
                operation["security"] = [{"key": []}]
            if method == "post":
                reference = {"$ref": f"#/components/schemas/{_BODIES[path].__name__}"}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    app.openapi_schema = document
    return document
