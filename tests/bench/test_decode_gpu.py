"""The GPU bench on a CPU: its parts run and count, and its check finds a kernel that is wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openwafer.serve.gpu.fast import TritonKernels

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_parts_on_a_tiny_shape(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / "decode_gpu.py"), "--device", "cpu", "--tiny", "--rounds", "1"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["one_user_tokens_per_s"] < found["one_user_bound"]
    assert found["first_token_s"] > 0
    assert found["users_4_total_tokens_per_s"] > 0
    assert "% of the bound" in done.stdout


def test_the_check_compares(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import _gpu_kernels  # pyright: ignore[reportMissingImports]
    from decode_gpu import TINY  # pyright: ignore[reportMissingImports]

    pytest.importorskip("triton", reason="there is no Triton for this platform")
    shape = replace(TINY, num_hidden_layers=1)  # each program takes a millisecond here
    case = _gpu_kernels.Case(name="both kinds", counts=[1, 9], starts=[40, 3])
    cpu = torch.device("cpu")
    assert _gpu_kernels.check(shape, cpu, [case], num_tokens=1) < 1e-5
    assert "greedy tokens: 4 of 4 equal" in capsys.readouterr().out
    right = TritonKernels.project_into
    monkeypatch.setattr(TritonKernels, "project_into", lambda *args: right(*args[:2], args[2] * 2, args[3]))
    assert _gpu_kernels.check(shape, cpu, [case], num_tokens=0) > 0.02
    assert "WRONG" in capsys.readouterr().out
