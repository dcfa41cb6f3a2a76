"""docs/complaints.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_complaint_has_a_test_that_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "complaints.md").read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 14))
    for row in rows:
        files = [ROOT / path for path in re.findall(r"`(tests/[\w/.]+)", row)]
        assert files, row
        assert all(path.exists() for path in files), row
        sources = "".join(path.read_text() for path in files if path.is_file())
        for name in re.findall(r"\btest_\w+(?=`)", row):
            assert f"def {name}(" in sources or (ROOT / f"{name}.py").exists(), name


def test_every_complaint_about_servers_too() -> None:
    text = (ROOT / "docs" / "complaints.md").read_text()
    section = text.partition("# What users of OpenAI-compatible servers complain about")[2]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`test" in line]
    assert len(rows) == 15
    for row in rows:
        files = ["tests/serve/api/test_complaints.py", *re.findall(r"`(tests/[\w/.]+)", row)]
        sources = "".join((ROOT / path).read_text() for path in files)
        names = re.findall(r"\btest_\w+(?=`)", row)
        assert all(f"def {name}(" in sources for name in names), row
