"""The documentation is run: every command block of every page, and every link."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_work(page: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_docs.py", "--run", page], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere_and_nothing_names_this_machine() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "check_docs.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
