"""The length check, on trees around its limits."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "check_length.py"


def function(num_lines: int) -> str:
    return "def f():\n" + "    pass\n" * (num_lines - 1)


@pytest.mark.parametrize(
    ("source", "code", "line"),
    [
        ("x = 1\n" * 400, 0, "   400 openwafer/a.py"),
        ("x = 1\n" * 401, 0, "   401 openwafer/a.py long"),
        ("x = 1\n" * 600, 0, "   600 openwafer/a.py long"),
        ("x = 1\n" * 601, 1, "   601 openwafer/a.py TOO LONG"),
        (function(60), 0, "    60 openwafer/a.py f:1"),
        (function(61), 0, "    61 openwafer/a.py f:1 long"),
        (function(100), 0, "   100 openwafer/a.py f:1 long"),
        (function(101), 1, "   101 openwafer/a.py f:1 TOO LONG"),
        (
            "class A:\n    async def f(self):\n" + "        pass\n" * 100,
            1,
            "   101 openwafer/a.py f:2 TOO LONG",
        ),
    ],
)
def test_limits(tmp_path: Path, source: str, code: int, line: str) -> None:
    (tmp_path / "openwafer").mkdir()
    (tmp_path / "openwafer" / "a.py").write_text(source)
    done = subprocess.run([sys.executable, TOOL, "--root", tmp_path], capture_output=True, text=True)
    assert done.returncode == code
    assert line in done.stdout.splitlines()


def test_everything_too_long_is_listed_not_only_the_longest(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    for name in "abcdefgh":
        (tmp_path / "bench" / f"{name}.py").write_text("x = 1\n" * 601)
    done = subprocess.run([sys.executable, TOOL, "--root", tmp_path], capture_output=True, text=True)
    assert done.stdout.count("TOO LONG") == 8
