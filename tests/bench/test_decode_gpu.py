"""The GPU bench on a CPU: its parts run and count, and its check finds a kernel that is wrong."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openwafer.serve.gpu.fast import TritonKernels

BENCH = Path(__file__).resolve().parents[2] / "bench"


def bench(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "decode_gpu.py"), *options]
    path = os.pathsep.join(filter(None, (str(BENCH.parent), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": path} | environment
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def test_parts_on_a_tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from _journal import read_journal  # pyright: ignore[reportMissingImports]

    out = tmp_path / "out.jsonl"
    parts = ("--parts", "bandwidth", "one", "users", "prompt", "packed", "streamed")
    done = bench("--device", "cpu", "--tiny", "--rounds", "1", *parts, "--out", str(out), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_journal(out)
    assert found["one_user_tokens_per_s"] < found["one_user_bound"]
    assert found["first_token_s"] > 0
    assert found["users_4_total_tokens_per_s"] > 0
    assert "% of the bound" in done.stdout
    # A token reads 5 and 8.5 bits of each weight.
    assert found["int4_one_user_bound"] > 1.3 * found["int8_one_user_bound"] > 2 * found["one_user_bound"]
    assert found["int4_users_2_total_tokens_per_s"] > 0
    layer = 4 * 256 * (2 * 256 + 2 * 128 + 3 * 256)
    assert layer < found["streamed_bytes"] < 1.1 * layer  # one of two layers
    assert found["streamed_floor_s"] * found["host_to_device_bytes_per_s"] == pytest.approx(found["streamed_bytes"])
    assert found["streamed_2_tokens_per_s"] > 0
    assert found["streamed_equal"] is True


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """Through to machine code; none keeps numbers in local memory."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    done = bench("--tiny", "--parts", "compile", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr
    names = ("gemv", "skinny", "rotate_and_store", "decode", "merge", "prompt", "norm")
    for name in (*names, "packed_gemv", "byte_gemv", "packed_skinny", "sum", "unpack"):
        assert f"\n{name}_kernel" in done.stdout


def test_a_part_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from _journal import Journal, read_journal  # pyright: ignore[reportMissingImports]

    journal = Journal(str(tmp_path / "out.jsonl"))
    journal.part("first", lambda: 1 // 0)
    journal.part("second", lambda: journal.note(second=2))
    assert journal.failed == ["first"]
    found = read_journal(tmp_path / "out.jsonl")
    assert found["second"] == 2
    assert "ZeroDivisionError" in found["first_failed"]
    assert "FAILED" in capsys.readouterr().out


def test_the_check_compares(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import _gpu_kernels  # pyright: ignore[reportMissingImports]
    from _journal import Journal  # pyright: ignore[reportMissingImports]
    from decode_gpu import TINY  # pyright: ignore[reportMissingImports]

    pytest.importorskip("triton", reason="there is no Triton for this platform")
    # Each program takes a millisecond here.
    shape = replace(TINY, num_hidden_layers=1, hidden_size=64, intermediate_size=96, vocab_size=128)
    case = _gpu_kernels.Case(name="both kinds", counts=[1, 9], starts=[40, 3])
    cpu = torch.device("cpu")
    assert _gpu_kernels.check(shape, cpu, Journal(None), [case], num_tokens=1) < 1e-5
    assert "greedy tokens: 4 of 4 equal" in capsys.readouterr().out
    right = TritonKernels.project_into
    monkeypatch.setattr(TritonKernels, "project_into", lambda *args: right(*args[:2], args[2] * 2, args[3]))
    assert _gpu_kernels.check(shape, cpu, Journal(None), [case], num_tokens=0) > 0.02
    assert "WRONG" in capsys.readouterr().out
