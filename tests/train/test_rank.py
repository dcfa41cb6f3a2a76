"""Runs on three hosts: real torchrun, real links, ranks killed and links cut; the weights are those of one worker."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosts as hosts_module
import pytest
import torch
from tiny_run import assert_same, tensors, write_params

from openwafer.cli.main import main

ROOT = Path(__file__).parents[2]
STEPS = 30
LOST_AFTER = 8


@pytest.fixture(scope="module", autouse=True)
def _can_make_hosts() -> None:
    reason = hosts_module.why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of more than one block, so that stripes cut through them; dropout, clipping, five micro-batches."""
    folder = tmp_path_factory.mktemp("hosts")
    return write_params(folder, num_steps=STEPS, batch_size=10, checkpoint_every=4, hidden_size=80)


@pytest.fixture(scope="module")
def whole(params: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What one worker on one host ends with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model_dir = tmp_path_factory.mktemp("whole")
    assert main(["train", "--params", str(params), "--model_dir", str(model_dir)]) == 0
    torch.set_num_threads(before)
    return tensors(model_dir, STEPS)


class Job:
    """The same command on every host, as docs/cluster.md has it."""

    def __init__(
        self, hosts: Any, folder: Path, params: Path, ranks: list[int], *flags: str, min_hosts: int, stubborn: list[int]
    ) -> None:
        """Hosts that are not `stubborn` do not come back after a loss."""
        self.logs = [folder / f"host{index}.log" for index in range(len(ranks))]
        self.model_dir = folder / "model"
        self.processes: list[subprocess.Popen[str]] = []
        for index, count in enumerate(ranks):
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={min_hosts}:{len(ranks)}"]
            command += [f"--nproc-per-node={count}", "--rdzv-backend=c10d", "--rdzv-id=job"]
            command += [f"--max-restarts={8 if index in stubborn else 0}"]
            command += [f"--rdzv-endpoint={hosts.address(0)}:29500", f"--local-addr={hosts.address(index)}"]
            # A real host knows its own name; these all have the name of the machine.
            quick = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=4"
            command += [f"--rdzv-conf=is_host={int(index == 0)},{quick}"]
            command += ["-m", "openwafer", "train", "--params", str(params), "--model_dir", str(self.model_dir)]
            command += ["--log_every", "1", "--lost_after", str(LOST_AFTER), *flags]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            environment["GLOO_SOCKET_IFNAME"] = hosts_module.INTERFACE
            with self.logs[index].open("w") as log:
                options = {"env": environment, "cwd": ROOT, "stdout": log, "stderr": log, "start_new_session": True}
                self.processes.append(hosts.start(index, command, **options))

    def wait_for(self, pattern: str, host: int = 0, timeout_s: float = 200) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.logs[host].read_text(errors="replace"), re.MULTILINE):
                return found
            time.sleep(0.05)
        raise AssertionError(f"no {pattern} on host {host} in\n{self.text(host)}")

    def text(self, host: int) -> str:
        return self.logs[host].read_text(errors="replace")[-6000:]

    def process_of(self, role: str, host: int = 0) -> int:
        """The process of a rank such as `csx 0`, by the newest line about it."""
        return int(re.findall(rf"rank \d+ \({role} on [^:]+:(\d+)\)", self.logs[host].read_text(errors="replace"))[-1])

    def finish(self, hosts: list[int], timeout_s: float = 250) -> None:
        deadline = time.monotonic() + timeout_s
        for index in hosts:
            status = self.processes[index].wait(timeout=max(1, deadline - time.monotonic()))
            assert status == 0, self.text(index)

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def job(tmp_path: Path, params: Path) -> Iterator[Any]:
    """Starts a job on three hosts; afterwards nothing of it is left."""
    started: list[Job] = []
    with hosts_module.Hosts(3) as hosts:

        def start(
            ranks: list[int], *flags: str, min_hosts: int = 3, stubborn: list[int] | None = None
        ) -> tuple[Job, Any]:
            options = {"min_hosts": min_hosts, "stubborn": [0, 1, 2] if stubborn is None else stubborn}
            started.append(Job(hosts, tmp_path, params, ranks, *flags, **options))
            return started[0], hosts

        yield start
        for one in started:
            one.close()


def test_two_stores_and_three_workers_give_the_bits_of_one(job: Any, whole: dict) -> None:
    run, _ = job([2, 2, 1], "--num_memoryx", "2", "--num_csx", "3")
    run.finish([0, 1, 2])
    assert_same(tensors(run.model_dir, STEPS), whole)


def test_ranks_that_are_killed_and_a_link_that_is_cut(job: Any, whole: dict) -> None:
    """Two stores and a worker each on two hosts; then one worker is left."""
    run, hosts = job([2, 1, 1], "--num_memoryx", "2", "--num_csx", "2", min_hosts=2)
    run.wait_for(r"^step 6/")
    killed = run.process_of("csx 0")
    os.kill(killed, signal.SIGKILL)
    run.wait_for(rf"^rank 0 .*: rank 2 \(csx 0 on \w+:{killed}\) was lost")
    run.wait_for(rf"rank [13] .*: rank 2 \(csx 0 on \w+:{killed}\) was lost", host=0)
    run.wait_for(r"^resuming from .*step_0000000[48]\n(.*\n)*?step 1\d/")
    killed = run.process_of("memoryx 1")
    os.kill(killed, signal.SIGKILL)
    run.wait_for(rf"^rank 0 .*: rank 1 \(memoryx 1 on \w+:{killed}\) was lost")
    run.wait_for(r"^step 1[89]/")
    hosts.cut(2)
    run.wait_for(r"was lost: nothing was heard of it for")
    run.wait_for(r"was lost: ", host=2)
    run.wait_for(r"going on with 1 of 2 workers")
    run.finish([0, 1])
    assert_same(tensors(run.model_dir, STEPS), whole)


@pytest.mark.skipif(
    "OPENWAFER_LOSSY" not in os.environ,
    reason="it takes a minute, most of it waiting for the launcher: set OPENWAFER_LOSSY",
)
def test_a_link_that_loses_half_its_packets(job: Any, whole: dict) -> None:
    """The host behind it is given up, and the other worker does its share. The host sees for itself that it is the
    link, and takes its launcher with it, though that is asked to come back as often as the others."""
    run, hosts = job([1, 1, 1], "--num_csx", "2", min_hosts=2)
    run.wait_for(r"^step 6/")
    hosts.lose_half(2)
    run.wait_for(r"^rank 0 .*: rank 2 \(csx 1 on \w+:\d+\) was lost")
    run.wait_for(r"^rank 2 .*: rank 0 .* was lost: its host 10.77.0.1 does not answer", host=2)
    run.wait_for(r"going on with 1 of 2 workers")
    run.finish([0, 1])
    assert_same(tensors(run.model_dir, STEPS), whole)
