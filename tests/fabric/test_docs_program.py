"""The first program of docs/fabric.md runs, prints what it says, and is short."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fabric.md"


def test_first_program() -> None:
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    program = match[1]
    assert len(program.splitlines()) <= 30
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PAGE.parents[1])
    promised = program.rsplit("#", 1)[1].strip()
    assert done.stdout.strip() == promised, done.stderr
