"""The tail of file and function lengths: `python tools/check_length.py`; fails on a file over 600 lines or
a function over 100, warns from 400 and 60.

The tail is what makes a code base hard to read, not the median, so the longest are printed every time.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("openwafer", "tools", "bench")
NUM_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Lines from which something is worth a look, and lines above which it is refused."""

    warn: int
    stop: int


FILE = Limit(warn=400, stop=600)
FUNCTION = Limit(warn=60, stop=100)


def functions(source: str) -> Iterator[tuple[int, str]]:
    """(lines, name:line) of each function and method, from `def` to its last line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1, f"{node.name}:{node.lineno}"


def measure(root: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(lines, where) of every file and of every function below `root`, longest first."""
    files, bodies = [], []
    for folder in FOLDERS:
        for path in (root / folder).rglob("*.py"):
            source, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
            files.append((len(source.splitlines()), name))
            bodies += [(lines, f"{name} {where}") for lines, where in functions(source)]
    return sorted(files, reverse=True), sorted(bodies, reverse=True)


def report(kind: str, lengths: list[tuple[int, str]], limit: Limit) -> bool:
    """Print the longest (and everything past a limit); whether all are within the hard stop."""
    print(f"longest {kind} (look at {limit.warn}, stop at {limit.stop}):")
    for rank, (lines, where) in enumerate(lengths):
        verdict = "TOO LONG" if lines > limit.stop else "long" if lines > limit.warn else ""
        if rank < NUM_SHOWN or verdict:
            print(f"{lines:6} {where} {verdict}".rstrip())
    return all(lines <= limit.stop for lines, _ in lengths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    files, bodies = measure(parser.parse_args().root)
    verdicts = [report("files", files, FILE), report("functions", bodies, FUNCTION)]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
