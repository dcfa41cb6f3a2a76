"""The tables of params keys in docs/, made from the configuration classes: `python tools/params_table.py`.

A table stands between `<!-- keys: SECTION -->` and `<!-- end -->`. Without flags the pages are rewritten; with
`--check` nothing is, and a page that is out of date is an error.
"""

import argparse
import dataclasses
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from openwafer.memoryx.config import GroupConfig
from openwafer.models.config import RopeScaling
from openwafer.params import SECTIONS
from openwafer.serve.api.config import ServeConfig
from openwafer.train.schedule import PartConfig

ROOT = Path(__file__).resolve().parent.parent
CLASSES = {
    **SECTIONS,
    "model.rope_scaling": RopeScaling,
    "optimizer.groups": GroupConfig,
    "schedule.parts": PartConfig,
    "serve": ServeConfig,
}
_MARKED = re.compile(r"(<!-- keys: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WORDS = {int: "whole number", float: "number", bool: "true or false", Path: "path", str: "text"}


def table(cls: type) -> str:
    """One row per field: key, kind of value, default, meaning."""
    hints = typing.get_type_hints(cls)
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        meaning = str(field.metadata["help"]).replace("|", "\\|")
        lines.append(f"| `{field.name}` | {_kind(hints[field.name], field)} | {_default(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _kind(hint: Any, field: dataclasses.Field[Any]) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if dataclasses.is_dataclass(hint):
        return "section"
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return "list of sections" if dataclasses.is_dataclass(inner) else "list"
    if field.metadata["size"]:
        return "size such as `4GiB`"
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    limits = [f"{word} {limit}" for word, limit in (("from", low), ("to", high)) if limit is not None]
    return " ".join([_WORDS[hint], *limits])


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "needed"
    value = field.default
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def updated(text: str) -> str:
    """The page with its tables as they should be."""
    return _MARKED.sub(lambda found: f"{found[1]}{table(CLASSES[found[2]])}{found[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    args = parser.parse_args()
    stale = []
    documented: set[str] = set()
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        documented |= {found[2] for found in _MARKED.finditer(text)}
        if updated(text) != text:
            stale.append(page.relative_to(ROOT))
            if not args.check:
                page.write_text(updated(text), encoding="utf-8")
    missing = sorted(set(CLASSES) - documented)
    if missing:
        print(f"no page in docs/ has a table of keys for: {', '.join(missing)}", file=sys.stderr)
    for page in stale if args.check else []:
        print(f"{page} does not agree with the configuration classes: run tools/params_table.py", file=sys.stderr)
    return 1 if missing or (args.check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
