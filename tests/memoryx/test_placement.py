"""What goes where under a budget, and how much memory a run really takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openwafer.errors import UserError
from openwafer.graph import Graph, capture
from openwafer.graph.deferred import deferred
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import check_space_to_save, close_tiers, open_tiers, place
from openwafer.memoryx.store import fields
from openwafer.models.build import build
from openwafer.models.config import ModelConfig

ROOT = Path(__file__).parents[2]
OPTIMIZER = make_optimizer(OptimizerConfig())


@pytest.fixture(scope="module")
def graph() -> Graph:
    config = ModelConfig(
        hidden_size=64, num_hidden_layers=6, num_heads=4, vocab_size=101, max_position_embeddings=16, dropout=0.1
    )
    with deferred():
        module = build(config)
    ids = torch.zeros(1, 16, dtype=torch.int64, device="meta")
    return capture(module.train(), (), {"input_ids": ids, "labels": ids.clone()})


def total_bytes(graph: Graph) -> int:
    return sum(spec.num_bytes for spec in fields(graph, OPTIMIZER))


def test_everything_in_dram_when_it_fits(graph: Graph) -> None:
    for dram in (None, total_bytes(graph)):
        placement = place(graph, OPTIMIZER, MemoryConfig(dram=dram))
        assert placement.total_dram_bytes == total_bytes(graph)
        assert not placement.flash


@pytest.mark.parametrize("percent", [22, 30, 50, 70, 90, 99])
def test_the_budget_is_kept_and_wires_come_first(graph: Graph, percent: int, tmp_path: Path) -> None:
    dram = total_bytes(graph) * percent // 100
    placement = place(graph, OPTIMIZER, MemoryConfig(dram=dram, flash=tmp_path))
    assert placement.total_dram_bytes <= dram
    assert placement.dram | placement.flash == {spec.key for spec in fields(graph, OPTIMIZER)}
    assert not placement.dram & placement.flash
    sizes = {spec.key: spec.num_bytes for spec in fields(graph, OPTIMIZER)}
    assert sum(sizes[key] for key in placement.dram) == placement.dram_bytes
    if any(field != "wire" for _, field in placement.dram):
        largest_left = max((sizes[key] for key in placement.flash if key[1] == "wire"), default=0)
        assert dram - placement.total_dram_bytes < largest_left or not largest_left
    if percent >= 70:
        assert all(field != "wire" for _, field in placement.flash)
        assert placement.dram_bytes > 0.4 * dram


def test_without_a_flash_folder(graph: Graph) -> None:
    with pytest.raises(UserError, match=r"need 3\.\d+ MiB, dram is 1 MiB: 2\.\d+ MiB are missing; .*--flash"):
        place(graph, OPTIMIZER, MemoryConfig(dram=1 << 20))


def test_too_small_for_one_unit_says_what_would_do(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dram 97\.66 KiB is too small.*give at least --dram \d+") as caught:
        place(graph, OPTIMIZER, MemoryConfig(dram=100_000, flash=tmp_path))
    least = int(str(caught.value).rpartition(" ")[2])
    assert place(graph, OPTIMIZER, MemoryConfig(dram=least, flash=tmp_path)).total_dram_bytes <= least
    with pytest.raises(UserError):
        place(graph, OPTIMIZER, MemoryConfig(dram=least - 1, flash=tmp_path))


def test_a_locked_folder(graph: Graph, tmp_path: Path) -> None:
    config = MemoryConfig(dram=1 << 20, flash=tmp_path)
    tiers = open_tiers(place(graph, OPTIMIZER, config), config)
    with pytest.raises(UserError, match="is used by another run"):
        open_tiers(place(graph, OPTIMIZER, config), config)
    close_tiers(tiers)
    close_tiers(open_tiers(place(graph, OPTIMIZER, config), config))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_disk_that_is_too_small_is_said_at_the_start(graph: Graph, tmp_path: Path) -> None:
    config = MemoryConfig(dram=1 << 20, flash=tmp_path)
    placement = place(graph, OPTIMIZER, config)
    assert 3 << 20 < placement.flash_bytes < 4 << 20
    for size, once, twice in (("3m", False, False), ("5m", True, False), ("9m", True, True)):
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(tmp_path)]).returncode != 0:
            pytest.skip("mounting is not allowed here")
        try:
            if not once:
                with pytest.raises(UserError, match=r"flash folder .* has .* MiB free, .* MiB are needed: free some"):
                    open_tiers(placement, config)
                continue
            tiers = open_tiers(placement, config)
            if twice:
                check_space_to_save(placement, config)
            else:
                with pytest.raises(UserError, match=r"has .* MiB free, 6\.\d+ MiB are needed: training goes on while"):
                    check_space_to_save(placement, config)
            close_tiers(tiers)
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)


# Trains in a process that cannot have more memory: all private writable memory, touched or not, counts against
# RLIMIT_DATA (on some machines torch's allocator takes a gigabyte in advance unless told not to). The base on top
# of budget + 10 % is for stacks of threads, activations, the gradients of a Unit, a weight while it is made, and
# the chunks that a checkpoint is written in.
LIMITED = """
import pathlib, re, resource, sys, torch
from openwafer.checkpoint import Checkpoint, latest, save
from openwafer.graph import capture
from openwafer.graph.deferred import deferred, initialise
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import close_tiers, open_tiers, place
from openwafer.memoryx.store import Store, fields
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.saver import Saver
from openwafer.train.streamed import Streamed, fill, restore

folder, uses_flash = pathlib.Path(sys.argv[1]), sys.argv[2] == "flash"
BASE = 256 << 20  # of address space: a thread's stack alone takes 8 MiB of it
RESIDENT_BASE = 128 << 20

def now(what):
    return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

def trained(hidden_size, layers, memory, steps):
    torch.manual_seed(0)
    with deferred():
        module = build(ModelConfig(hidden_size=hidden_size, num_hidden_layers=layers, num_heads=8, vocab_size=64,
                                   max_position_embeddings=16))
    batch = {"input_ids": torch.arange(16).view(1, 16), "labels": torch.arange(16).view(1, 16)}
    graph = capture(module.train(), (), batch)
    optimizer = make_optimizer(OptimizerConfig())
    state = sum(spec.num_bytes for spec in fields(graph, optimizer))
    config = memory(state)
    tiers = open_tiers(place(graph, optimizer, config), config)
    store = Store(graph, optimizer, tiers)
    fill(store, initialise(module, graph.weights, 0))
    engine = Streamed(graph, store, {}, OptimizerConfig(lr=1e-3), lambda step: 1.0)
    def write(step, tensors):
        return save(folder / "model", step, tensors, {}, shard_bytes=16 << 20)  # small enough to be mapped
    saver = Saver(write, print)
    losses = []
    for step in range(steps):
        losses.append(engine.step([batch]).loss)
        if step in (1, 3):
            saver.start(step + 1, engine.freeze)
    saver.close()
    close_tiers(tiers)
    if steps == 1:
        return
    assert losses[-1] < losses[0], losses
    assert saver.saved_step == 4
    assert now("VmHWM") <= most, (now("VmHWM") >> 20, most >> 20)
    print("trained")
    del engine, store  # and from the checkpoint, under the same limit
    tiers = open_tiers(place(graph, optimizer, config), config)
    store, stored = Store(graph, optimizer, tiers), Checkpoint.open(latest(folder / "model"))
    restore(store, stored.read)
    engine = Streamed(graph, store, {}, OptimizerConfig(lr=1e-3), lambda step: 1.0, num_steps_done=stored.step)
    assert engine.step([batch]).loss == losses[4]
    close_tiers(tiers)
    print("resumed")

def limited(state):
    budget = state // 3
    allowance = budget * 11 // 10 + BASE
    assert state > allowance
    resource.setrlimit(resource.RLIMIT_DATA, (now("VmData") + allowance, -1))
    global most
    most = now("VmRSS") + budget * 11 // 10 + RESIDENT_BASE
    print("state", state >> 20, "MiB, allowed", allowance >> 20, "MiB")
    return MemoryConfig(dram=budget, flash=folder / "flash") if uses_flash else MemoryConfig()

trained(64, 6, lambda state: MemoryConfig(dram=state // 2, flash=folder / "flash"), 1)  # code and threads are there
trained(512, 13, limited, 5)
"""


def test_a_model_of_three_times_the_budget_trains_and_resumes_under_a_memory_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    environment = {**os.environ, "MIMALLOC_ARENA_EAGER_COMMIT": "0", "MIMALLOC_PURGE_DELAY": "0"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*command, "flash"], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained" in done.stdout
    assert "resumed" in done.stdout
    # The limit is real: the same in DRAM does not start.
    done = subprocess.run([*command, "dram"], **options)
    assert done.returncode != 0
    assert "cannot get" in done.stderr or "not enough memory" in done.stderr
