"""Which JSON schema keywords can be enforced. One that cannot is named, never ignored."""

from collections.abc import Mapping
from typing import Any

_ENFORCED = {
    *("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties"),
    *("minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "additionalItems"),
    *("minLength", "maxLength", "pattern", "format", "contentEncoding"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("anyOf", "allOf", "$ref", "$defs", "definitions", "$anchor", "$id", "$schema"),
}
_ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
}
# Where other schemas stand: as a value, as the values of a mapping, in a list.
_SCHEMA = {"additionalProperties", "items", "additionalItems"}
_MAPPINGS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS = {"anyOf", "allOf", "prefixItems"}


def unsupported(schema: Any, where: str = "schema") -> str | None:
    """What cannot be enforced, as a sentence; None when everything can. (llguidance checks the values.)"""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping):
        return f"{where} must be a JSON schema (an object), got {type(schema).__name__}"
    for key, value in schema.items():
        if key in _ANNOTATIONS or key.startswith("x-"):
            if key == "x-guidance":
                return f"{where} has the keyword 'x-guidance', which is not supported"
            continue
        if key not in _ENFORCED:
            return f"{where} has the keyword {key[:60]!r}, which is not supported"
        if problem := _inside(key, value, where):
            return problem
    return None


def _inside(key: str, value: Any, where: str) -> str | None:
    if key in _MAPPINGS:
        if not isinstance(value, Mapping):
            return f"{where}.{key} must be an object"
        inner = [(value[name], f"{where}.{key}.{name}") for name in value]
    elif key in _LISTS:
        if not isinstance(value, list):
            return f"{where}.{key} must be a list"
        inner = [(item, f"{where}.{key}[{number}]") for number, item in enumerate(value)]
    elif key in _SCHEMA:
        inner = [(value, f"{where}.{key}")]
    else:
        return None
    return next(filter(None, (unsupported(schema, name) for schema, name in inner)), None)
