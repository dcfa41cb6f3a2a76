"""The benchmarks in bench/, one line each: `python tools/list_benches.py`."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    benches = sorted(path for path in (ROOT / "bench").glob("*.py") if not path.name.startswith("_"))
    for path in benches:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "(no docstring)"
        print(f".venv/bin/python {path.relative_to(ROOT)}\n    {docstring.splitlines()[0]}")
    if not benches:
        print("no benchmarks yet: bench/ is empty")


if __name__ == "__main__":
    main()
