"""bench/capture.py runs, and the README's table says what it wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_measures_all_three(tmp_path: Path) -> None:
    out = tmp_path / "capture.json"
    command = [sys.executable, ROOT / "bench" / "capture.py", "--presets", "gpt_tiny", "--repeats", "1", "--out", out]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows.keys() == {"ours", "peer", "floor"}
    assert {row["num_parameters"] for row in rows.values()} == {2_197_632}
    assert rows["ours"]["num_units"] == 6
    assert rows["peer"]["num_operations"] > 50
    assert all(row["seconds"] > 0 and row["peak_mib"] > row["import_mib"] for row in rows.values())


def test_the_readme_says_what_was_measured() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "docs" / "results" / "capture.json").read_text(encoding="utf-8"))
    by_preset: dict[str, list[str]] = {}
    for row in result["rows"]:
        by_preset.setdefault(row["preset"], []).append(f"{row['seconds']:.1f} s, {row['peak_mib']} MiB")
    for preset, cells in by_preset.items():
        assert f"| `{preset}` | {' | '.join(cells)} |" in readme
    assert f"Importing PyTorch alone takes {result['rows'][0]['import_mib']} MiB" in readme
