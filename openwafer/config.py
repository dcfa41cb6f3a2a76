"""Configuration: small frozen dataclasses, built strictly from YAML mappings and command-line flags.

A config class lives beside its owner and declares each field once, with `option(default, help=...)`; this
module turns a mapping into an instance and every mistake in it into one sentence.
"""

import argparse
import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Hashable, Iterable, Mapping
from decimal import Decimal
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
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # pyright: ignore[reportArgumentType]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        text = key if isinstance(key, str) else _shown(key)
        name = f"{where}.{text}" if where else text
        if key not in fields:
            raise UserError(unknown(f"key {_shown(name)}", text, fields))
        values[key] = convert(value, hints[key], name, fields[key].metadata)
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where + '.' if where else ''}{name} is missing: {field.metadata['help']}")
    return cls(**values)


def conform(config: Any) -> None:
    """Hold a frozen dataclass that was made in Python to the rules of a params file; for its `__post_init__`."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not field.default:  # a default may stand for one that is filled in later
            object.__setattr__(config, field.name, convert(value, hints[field.name], field.name, field.metadata))


def convert(value: Any, kind: Any, name: str, metadata: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """`value` as `kind` within the limits in `metadata`, or a UserError that names the field."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        return _any_of(value, typing.get_args(kind), name, metadata)
    if typing.get_origin(kind) is Literal:
        return _one_of(value, typing.get_args(kind), name)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{name} must be a list, got {_shown(value)}")
        items = typing.get_args(kind)
        if items[-1] is Ellipsis:
            items = items[:1] * len(value)
        if len(value) != len(items):
            raise UserError(f"{name} must be a list of {len(items)} values, got {_shown(value)}")
        # The limits of a list are those of each of its values.
        return tuple(
            convert(v, item, f"{name}[{i}]", metadata) for i, (v, item) in enumerate(zip(value, items, strict=True))
        )
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else parse(kind, value, name)  # pyright: ignore
    if metadata.get("size"):
        value = parse_size(value, name)
    result = _scalar(value, kind, name)
    if metadata.get("choices") is not None:
        _one_of(result, metadata["choices"], name)
    return _within(result, metadata.get("minimum"), metadata.get("maximum"), name)


def _any_of(value: Any, kinds: tuple[Any, ...], name: str, metadata: Mapping[str, Any]) -> Any:
    """`value` as the first of `kinds` that takes it; None only where it is among them."""
    if value is None:
        if type(None) not in kinds:
            raise UserError(f"{name} must not be empty")
        return None
    reasons = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return convert(value, kind, name, metadata)
        except UserError as error:
            reasons.append(str(error))
    raise UserError("; or ".join(reasons))


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


class _Shortener(reprlib.Repr):
    """`repr` in one short line. Bounded in time too: YAML aliases can describe lists of 2 ** 1000 values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers of more than 4300 digits.
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"a number of {x.bit_length()} bits"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # The inherited one sorts the keys, which YAML does not promise to be comparable.
        shown = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in [*x.items()][:4]]
        return "{" + ", ".join(shown + ["..."] * (len(x) > 4)) + "}" if level > 0 else "{...}"


def _shown(value: Any) -> str:
    text = _Shortener().repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown(what: str, given: str, known: Iterable[str]) -> str:
    """The sentence for an unknown name, with the nearest right one."""
    known = sorted(known)
    given = given[:80]
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {what}: {hint}"


def parse_size(value: Any, name: str = "size") -> int:
    """Bytes from `20GiB`, `1.5 MB` or a plain number."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = str(value) if isinstance(value, (float, str)) else ""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise UserError(f"{name} must be a size such as 4GiB or 500MB, got {_shown(value)}")
    return int(Decimal(match[1]) * _SIZE_UNITS[match[2].upper()])


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that a key given twice is an error rather than the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                key = (key_node.tag, key_node.value)
                if key in seen:
                    problem = f"the key {_shown(key_node.value)} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)


# Besides its own errors PyYAML lets through what Python raises on a bad tagged scalar, such as `!!int ""`.
_YAML_ERRORS = (
    yaml.YAMLError,
    ValueError,
    OverflowError,
    RecursionError,
    LookupError,
    TypeError,
    AttributeError,
)


def load_yaml(path: Path) -> Any:
    """The contents of a YAML file; an unreadable or malformed one is a UserError with the line."""
    shown = str(path) if str(path).isprintable() else repr(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no such file: {shown}") from None
    except (OSError, ValueError) as error:
        # ValueError: not UTF-8, or a path that no file can have.
        raise UserError(f"cannot read {shown}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return yaml.load(text, _Loader)
    except _YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise UserError(f"{shown}{line} is not valid YAML: {' '.join(problem.split())}") from None


def add_flags(parser: argparse.ArgumentParser, cls: type, names: Iterable[str]) -> None:
    """Flags for some fields of a config class; help and type come from the field, the default stays there."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in names:
        field = fields[name]
        metavar = "SIZE" if field.metadata.get("size") else _metavar(hints[name])
        given: dict[str, Any] = {"metavar": metavar, "help": _flag_help(field), "default": argparse.SUPPRESS}
        if _plain(hints[name]) is bool:
            given |= {"nargs": "?", "const": "true", "action": _Switch}
        parser.add_argument(f"--{name}", **given)


class _Switch(argparse.Action):
    """`--x` means `--x true`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if not isinstance(yaml_scalar(values), bool):
            # It may be an argument that belongs to nobody: `serve --batch_invariant MODEL`.
            raise UserError(f"{option} must be true or false, got {values!r}: is `{option} true` meant?")
        setattr(namespace, self.dest, values)


def flag_values(cls: type, namespace: argparse.Namespace) -> dict[str, Any]:
    """The fields of `cls` that were given as flags, converted and checked."""
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        if hasattr(namespace, field.name):
            text = getattr(namespace, field.name)
            # `--seed 3` arrives as text: read it as YAML would, so a flag and a params key mean the same.
            value = text if field.metadata.get("size") else _flag_value(text, _plain(hints[field.name]))
            values[field.name] = convert(value, hints[field.name], f"--{field.name}", field.metadata)
    return values


def _flag_value(text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        # A list is `0.9,0.95`, with or without YAML's brackets.
        items = text.strip().removeprefix("[").removesuffix("]").split(",")
        return [_flag_value(item.strip(), typing.get_args(kind)[0]) for item in items if item.strip()]
    is_text = kind in (str, Path)
    if typing.get_origin(kind) is Literal:
        is_text = all(isinstance(choice, str) for choice in typing.get_args(kind))
    return text if is_text else yaml_scalar(text)


def yaml_scalar(text: str) -> Any:
    """The number, truth value or null that YAML sees in `text`, else the text itself."""
    try:
        value = yaml.safe_load(text)
    except _YAML_ERRORS:
        return text
    return value if isinstance(value, (bool, int, float)) or (value is None and text.strip()) else text


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
