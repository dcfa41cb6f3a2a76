"""The benches of the server run, and count what they say they count."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[2] / "bench"


def run(script: str, out: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCH / script), *flags, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_http_overhead(tmp_path: Path):
    result = run("http_overhead.py", tmp_path / "out.json", "--streams", "4", "--tokens", "40", "--repeats", "1")
    assert [row["system"] for row in result["many_streams"]] == ["ours", "peer", "floor"]
    assert all(row["tokens_per_s"] > 0 for row in result["many_streams"])
    # One token in 5 ms cannot be 300 in a second.
    assert 0 < result["one_user"]["served_tokens_per_s"] < 300


def test_soak(tmp_path: Path):
    # A few seconds say nothing about memory: the exit code may be 1 for that alone.
    command = [sys.executable, str(BENCH / "soak.py"), "--minutes", "0.05", "--clients", "6", "--burst", "20"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out.json")], capture_output=True, text=True)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["burst"] == {"200": 20}
    assert result["unexpected"] == 0, done.stdout
    assert sum(result["requests"].values()) > 6
    assert not any(result["left_over"].values())


def test_the_page_says_what_was_measured():
    docs = BENCH.parent / "docs"
    page = " ".join((docs / "serving.md").read_text(encoding="utf-8").split())
    overhead = json.loads((docs / "results" / "http_overhead.json").read_text())
    for name in ("tokens_per_s", "tokens_per_s_per_core"):
        cells = " | ".join(f"{row[name]:,}" for row in overhead["many_streams"])
        assert f"| {cells} |" in page
    user = overhead["one_user"]
    assert (
        f"gets {user['served_tokens_per_s']} tokens/s where the engine alone makes {user['engine_tokens_per_s']}"
        in page
    )
    assert f"from {user['engine_cpu_us_per_token']:,} to {user['served_cpu_us_per_token']:,} µs" in page
    soak = json.loads((docs / "results" / "soak.json").read_text())
    assert f"{sum(soak['requests'].values()):,} requests" in page
    memory = soak["memory_mib"]
    assert f"{memory['second_tenth']:.0f} MiB of memory at the beginning and {memory['last_tenth']:.0f} MiB" in page
