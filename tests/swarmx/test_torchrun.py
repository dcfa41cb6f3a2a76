"""What a process learns from torchrun, and that it does not outlive it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openwafer.errors import UserError
from openwafer.swarmx.torchrun import Launched

CHILD = """
import time
from openwafer.swarmx.torchrun import end_with_launcher
end_with_launcher()
print("here", flush=True)
time.sleep(60)
"""
LAUNCHER = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
"""


def test_the_place_of_a_rank() -> None:
    third = {"RANK": "5", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}
    assert Launched.read(third, "") == Launched(5, 2, 3)
    assert Launched.read(third, "").first_of_host == 3
    with pytest.raises(UserError, match="LOCAL_RANK is not set, so nobody knows: start with torchrun"):
        Launched.read({"RANK": "0"}, "nobody knows")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_rank_ends_when_its_launcher_is_killed() -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        child = Path(f"/proc/{int(launcher.stdout.readline())}")
        assert child.exists()
        launcher.kill()
    deadline = time.monotonic() + 20
    while not _has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _has_ended(child)


def _has_ended(process: Path) -> bool:
    try:
        return "\nState:\tZ" in (process / "status").read_text()
    except OSError:
        return True
