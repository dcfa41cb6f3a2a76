"""`openwafer train --num_csx N` as a user runs it: real processes, killed, stopped and out of disk, the same bits."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_run import assert_same, tensors, write_params

from openwafer.checkpoint import Checkpoint, latest
from openwafer.cli.main import main
from openwafer.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 40
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with dropout and clipping, five micro-batches per step."""
    folder = tmp_path_factory.mktemp("swarm")
    return write_params(folder, num_steps=STEPS, batch_size=10)


@pytest.fixture(scope="module")
def whole(params: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What one worker that nobody disturbed ends with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model_dir = tmp_path_factory.mktemp("whole")
    assert main(["train", "--params", str(params), "--model_dir", str(model_dir)]) == 0
    torch.set_num_threads(before)
    return tensors(model_dir, STEPS)


class Run:
    """A running command whose lines are read as they come."""

    def __init__(self, params: Path, model_dir: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "openwafer", "train", "--params", str(params), "--model_dir", str(model_dir)]
        command += ["--log_every", "1", *flags]
        self.process = subprocess.Popen(
            command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._output = self._read()
        self.csx: dict[int, int] = {}  # worker → its process, the newest

    def _read(self) -> Iterator[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"csx (\d+) \(process (\d+)\)", line):
                self.csx[int(found[1])] = int(found[2])
            yield line

    def until(self, pattern: str) -> None:
        for line in self._output:
            if re.search(pattern, line):
                return
        raise AssertionError(f"no {pattern} in\n{self.text}")

    def finish(self) -> int:
        for _ in self._output:
            pass
        assert self.process.stderr is not None
        self.process.stderr.close()
        return self.process.wait(timeout=60)

    @property
    def text(self) -> str:
        return "".join(self.lines)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def assert_gone(pids: list[int], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No shared memory outlives its run, however that ends. Other programs have some there for a moment."""
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 60
    while (left := set(os.listdir("/dev/shm")) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_stopped_with_four_workers_it_goes_on_with_two(params: Path, whole: dict, tmp_path: Path) -> None:
    run = Run(params, tmp_path, "--num_csx", "4")
    run.until(r"^step 7/")
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.text
    assert "the same command goes on from there" in run.text
    assert "Traceback" not in run.text
    assert_gone(list(run.csx.values()))
    stopped = latest(tmp_path)
    assert stopped is not None
    assert 7 <= Checkpoint.open(stopped).step < STEPS
    again = Run(params, tmp_path, "--num_csx", "2", "--mode", "train_and_eval")
    assert again.finish() == 0, again.text
    assert_same(tensors(tmp_path, STEPS), whole)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["broadcast_bytes"] > 2 * 2 * 4 * 35_000, "forward and backward, two workers, fp32"
    assert last["reduced_bytes"] > 0
    assert len(last["csx"]) == 2
    assert all(csx["micro_batches_per_s"] > 0 for csx in last["csx"])


def test_killed_and_stopped_workers_are_replaced(params: Path, whole: dict, tmp_path: Path) -> None:
    run = Run(params, tmp_path, "--num_csx", "2", "--lost_after", "4")
    run.until(r"^step 7/")
    run.until(r"csx 1 .process")
    killed = run.csx[1]
    os.kill(killed, signal.SIGKILL)
    run.until(rf"csx 1 \(process {killed}\) was lost: .*; going on from step \d+ with 2 workers")
    first = dict(run.csx)
    run.until(r"^step 1[1-9]/")
    run.until(r"csx 1 .process")
    stopped = run.csx[0]
    assert stopped != first[0], "all workers are new"
    os.kill(stopped, signal.SIGSTOP)
    run.until(rf"csx 0 \(process {stopped}\) was lost: nothing was heard of it for 4 s; going on from step 1\d with 2")
    assert run.finish() == 0, run.text
    assert_same(tensors(tmp_path, STEPS), whole)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert_gone([killed, stopped, *first.values(), *run.csx.values()])


def test_when_the_launcher_dies_the_workers_end_and_the_same_command_resumes(
    params: Path, whole: dict, tmp_path: Path
) -> None:
    run = Run(params, tmp_path, "--num_csx", "2", "--lost_after", "4")
    run.until(r"^step 12/")
    run.process.kill()
    assert run.finish() == -signal.SIGKILL
    assert_gone(list(run.csx.values()))
    again = Run(params, tmp_path, "--num_csx", "3")
    assert again.finish() == 0, again.text
    assert "resuming from" in again.text
    assert_same(tensors(tmp_path, STEPS), whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that can be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_no_half_checkpoint_and_the_same_command_resumes(
    params: Path, whole: dict, small_disk: Path
) -> None:
    run = Run(params, small_disk, "--num_csx", "2")
    run.until(r"^step 12/")
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(65536))
            file.flush()
    os.truncate(filler, filler.stat().st_size - 65536)  # lines of metrics.jsonl fit, a checkpoint does not
    assert run.finish() == 2, run.text
    assert "No space left" in run.text
    assert "earlier checkpoints are intact" in run.text
    assert "Traceback" not in run.text
    assert_gone(list(run.csx.values()))
    stopped = latest(small_disk)
    assert stopped is not None
    assert Checkpoint.open(stopped).step >= 5
    filler.unlink()
    again = Run(params, small_disk, "--num_csx", "2")
    assert again.finish() == 0, again.text
    assert_same(tensors(small_disk, STEPS), whole)
