"""The tables of params keys in docs/ agree with the configuration classes."""

import dataclasses
import subprocess
import sys
from pathlib import Path

from openwafer.params import SECTIONS

ROOT = Path(__file__).parents[2]


def test_the_pages_are_up_to_date() -> None:
    command = [sys.executable, "tools/params_table.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_every_key_has_a_row_with_its_help() -> None:
    """Said once more without the tool: a tool that wrote nothing would also be up to date."""
    pages = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("params.md", "models.md"))
    for cls in SECTIONS.values():
        for field in dataclasses.fields(cls):
            assert f"| `{field.name}` |" in pages
            assert field.metadata["help"].replace("|", "\\|") in pages
