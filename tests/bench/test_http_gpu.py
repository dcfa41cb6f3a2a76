"""The bench of HTTP before a GPU engine, on a CPU: both ways give numbers, and what came through HTTP is counted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_all_parts_on_a_tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from _child import child_environment  # pyright: ignore[reportMissingImports]
    from _journal import read_journal  # pyright: ignore[reportMissingImports]

    out = tmp_path / "out.jsonl"
    command = [sys.executable, str(BENCH / "http_gpu.py"), "--device", "cpu", "--tiny", "--switch_ms", "1"]
    command += ["--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(TRITON_INTERPRET="0"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_journal(out)
    for users in (1, 4):
        alone, served = (found[f"users_{users}_{way}_decode_tokens_per_s"] for way in ("engine", "http"))
        assert alone > 0
        assert served > 0
        lost = found[f"users_{users}_decode_lost_percent"]
        assert served == pytest.approx(alone * (1 - lost / 100))
    assert found["http_first_token_s"] > 0
    assert found["health"] == "ok"
    assert found["users_4_switching_decode_tokens_per_s"] > 0
    # Two ways: one and four users, once to warm up and once measured, and two prompts of one token. The real client.
    assert found["http_requests"] == 2 * (2 * (1 + 4) + 2) + 1
    assert found["http_tokens"] == 2 * ((1 + 4) * (8 + 12) + 2) + 12
    assert found["openai_client"] is not None


def test_processes_of_a_bench_find_what_the_bench_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from _child import child_environment  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("PYTHONPATH", f"/a{os.pathsep}/b")
    assert child_environment(X="1")["PYTHONPATH"].split(os.pathsep) == [str(BENCH.parent), "/a", "/b"]
    assert child_environment(X="1")["X"] == "1"
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == str(BENCH.parent)
