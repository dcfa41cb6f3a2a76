"""Configuration: small frozen dataclasses, built strictly from YAML mappings and command-line flags.

A config class lives beside its owner and declares each field once, with `option(default, help=...)`; this
module turns a mapping into an instance and every mistake in it into one sentence.
"""

import argparse
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from openwafer.errors import UserError

T = TypeVar("T")

_SIZE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _SIZE_UNITS[f"{_letter}B"] = 1000**_power
    _SIZE_UNITS[f"{_letter}IB"] = _SIZE_UNITS[_letter] = 1024**_power


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Iterable[Any] | None = None,
    size: bool = False,
) -> Any:
    """A dataclass field with its help text and limits; `size=True` accepts values such as `4GiB`."""
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": None if choices is None else tuple(choices),
        "size": size,
    }
    return dataclasses.field(default=default, metadata=metadata)


def parse(cls: type[T], mapping: Any, where: str = "") -> T:
    """Build `cls` from `mapping`; `where` names the section in errors (for instance `model`)."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{where or 'params'} must be a mapping of keys to values, got {_shown(mapping)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in fields:
            raise UserError(unknown(f"key {name!r}", str(key), fields))
        values[key] = convert(value, hints[key], name, fields[key].metadata)
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where + '.' if where else ''}{name} is missing: {field.metadata['help']}")
    return cls(**values)


def convert(value: Any, kind: Any, name: str, metadata: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """`value` as `kind` within the limits in `metadata`, or a UserError that names the field."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        if value is None:
            if len(inner) == len(typing.get_args(kind)):
                raise UserError(f"{name} must not be empty")
            return None
        kind = inner[0]
    if typing.get_origin(kind) is Literal:
        return _one_of(value, typing.get_args(kind), name)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{name} must be a list, got {_shown(value)}")
        item = typing.get_args(kind)[0]
        return tuple(convert(v, item, f"{name}[{i}]") for i, v in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else parse(kind, value, name)  # pyright: ignore
    if metadata.get("size"):
        value = parse_size(value, name)
    result = _scalar(value, kind, name)
    if metadata.get("choices") is not None:
        _one_of(result, metadata["choices"], name)
    return _within(result, metadata.get("minimum"), metadata.get("maximum"), name)


def _scalar(value: Any, kind: Any, name: str) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and not isinstance(value, bool):
        # YAML 1.1 reads `3e-4` (no dot) as a string; people write learning rates that way.
        with_number = _number(value)
        if with_number is not None:
            return with_number
    if kind is str and isinstance(value, str):
        return value
    if kind is Path and isinstance(value, (str, Path)) and str(value) and "\0" not in str(value):
        return Path(value)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    raise UserError(f"{name} must be {words.get(kind, kind)}, got {_shown(value)}")


def _number(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _within(value: Any, minimum: float | None, maximum: float | None, name: str) -> Any:
    if minimum is not None and value < minimum:
        raise UserError(f"{name} must be at least {minimum}, got {_shown(value)}")
    if maximum is not None and value > maximum:
        raise UserError(f"{name} must be at most {maximum}, got {_shown(value)}")
    return value


def _one_of(value: Any, choices: Iterable[Any], name: str) -> Any:
    choices = list(choices)
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise UserError(f"{name} must be one of {', '.join(map(str, choices))}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown(what: str, given: str, known: Iterable[str]) -> str:
    """The sentence for an unknown name, with the nearest right one."""
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {what}: {hint}"


def parse_size(value: Any, name: str = "size") -> int:
    """Bytes from `20GiB`, `1.5 MB` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value)) if _is_size(value) else None
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise UserError(f"{name} must be a size such as 4GiB or 500MB, got {_shown(value)}")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)


def load_yaml(path: Path) -> Any:
    """The contents of a YAML file; an unreadable or malformed one is a UserError with the line."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise UserError(f"{path}{line} is not valid YAML: {problem}") from None


def add_flags(parser: argparse.ArgumentParser, cls: type, names: Iterable[str]) -> None:
    """Flags for some fields of a config class; help and type come from the field, the default stays there."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in names:
        field = fields[name]
        parser.add_argument(
            f"--{name}", metavar=_metavar(hints[name]), help=_flag_help(field), default=argparse.SUPPRESS
        )


def flag_values(cls: type, namespace: argparse.Namespace) -> dict[str, Any]:
    """The fields of `cls` that were given as flags, converted and checked."""
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        if hasattr(namespace, field.name):
            text = getattr(namespace, field.name)
            # `--seed 3` arrives as text: read it as YAML would, so a flag and a params key mean the same.
            is_text = field.metadata.get("size") or _plain(hints[field.name]) in (str, Path)
            value = text if is_text else yaml_scalar(text)
            values[field.name] = convert(value, hints[field.name], f"--{field.name}", field.metadata)
    return values


def yaml_scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float)) or (value is None and text != "") else text


def _plain(kind: Any) -> Any:
    """The type inside `X | None`."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        return next(arg for arg in typing.get_args(kind) if arg is not type(None))
    return kind


def _metavar(kind: Any) -> str:
    kind = _plain(kind)
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    return {int: "N", float: "X", bool: "true|false", Path: "PATH"}.get(kind, "TEXT")


def _flag_help(field: dataclasses.Field) -> str:
    text = field.metadata["help"].replace("%", "%%")
    if field.default not in (dataclasses.MISSING, None):
        text += f" (default {field.default})"
    return text
