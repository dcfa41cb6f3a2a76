"""SwarmX on one host: two workers against one and against PyTorch DDP, memory of N workers, and many workers.

    python bench/swarmx_scaling.py [--part scaling|memory|many] [--steps 4] [--hidden_size 512] [--layers 4]

scaling: one thread per worker; the same model, batch and steps, nothing recomputed on either side. DDP is PyTorch's
with gloo, gradients summed over the same samples and accumulated under `no_sync`, and the same fused AdamW. Runs take
turns, and the median step of each counts. On a busy machine the seconds of CPU say more than those of the clock.
memory: what N workers hold together (proportional set size), and how much of that is weights.
many: 8 and 16 workers on a tiny model for 200 steps, and whether their weights are those of one worker.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from openwafer.graph import capture
from openwafer.graph.deferred import initialise
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.swarmx.config import SwarmConfig
from openwafer.swarmx.shared_memory import SharedTier
from openwafer.train.streamed import Streamed, fill
from openwafer.train.workers import LocalWorkers

OPTIMIZER = OptimizerConfig(lr=1e-3)
MICRO_BATCH = 2


class Setup:
    """What is trained."""

    def __init__(self, hidden_size: int, layers: int, context: int, micro_batches: int, vocabulary: int) -> None:
        self.model = ModelConfig(
            family="llama",
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            num_heads=max(1, hidden_size // 64),
            vocab_size=vocabulary,
            max_position_embeddings=context,
        )
        self.micro_batches = micro_batches

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return build(self.model)

    def batch(self, step: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(step)
        shape = (self.micro_batches, MICRO_BATCH, self.model.max_position_embeddings)
        ids = torch.randint(0, self.model.vocab_size, shape, generator=generator)
        return [{"input_ids": part, "labels": part.roll(-1, dims=1)} for part in ids]


def engine(setup: Setup, workers: LocalWorkers | None, *, recompute: bool) -> Streamed:
    module = setup.module()
    graph = capture(module.train(), (), setup.batch(0)[0])
    optimizer = make_optimizer(OPTIMIZER)
    tier = DramTier() if workers is None else SharedTier(workers.pool.weights)
    store = Store(graph, optimizer, {spec.key: tier for spec in fields(graph, optimizer)})
    fill(store, initialise(module, graph.weights, 0))
    options: dict[str, Any] = {"recompute": recompute}
    if workers is not None:
        link, swarm = workers.attach(graph, store, 0, options)
        options |= {"link": link, "swarm": swarm}
    buffers = dict(initialise(module, [name for name in graph.buffers if name not in graph.constants], 0))
    return Streamed(graph, store, buffers, OPTIMIZER, lambda step: 1.0, **options)


def timed_steps(trained: Streamed, setup: Setup, steps: int) -> list[float]:
    times = []
    for step in range(steps):
        batch = setup.batch(step)
        began = time.perf_counter()
        trained.step(batch)
        times.append(time.perf_counter() - began)
    return times


# PyTorch DDP


def ddp_rank(rank: int, size: int, port: int, setup: Setup, commands: Any, times: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = nn.parallel.DistributedDataParallel(setup.module().train(), gradient_as_bucket_view=True)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=(0.9, 0.95), fused=True)
    while (steps := commands.get()) is not None:
        began = time.process_time()
        seconds = [ddp_step(model, optimizer, setup, rank, size, step) for step in range(steps)]
        times.put((seconds, time.process_time() - began))
    dist.destroy_process_group()


def ddp_step(model: Any, optimizer: Any, setup: Setup, rank: int, size: int, step: int) -> float:
    batch = setup.batch(step)
    mine = batch[rank * len(batch) // size : (rank + 1) * len(batch) // size]
    dist.barrier()
    began = time.perf_counter()
    optimizer.zero_grad()
    count = sum(part["labels"].numel() for part in batch)
    for index, part in enumerate(mine):
        is_last = index == len(mine) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss, _ = model(**part)
            (loss * size / count).backward()
    optimizer.step()
    dist.barrier()
    return time.perf_counter() - began


class Ddp:
    """Processes that take DDP steps when asked."""

    def __init__(self, setup: Setup, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands = [context.Queue() for _ in range(size)]
        self._times = [context.Queue() for _ in range(size)]
        self._processes = [
            context.Process(target=ddp_rank, args=(r, size, 29713, setup, self._commands[r], self._times[r]))
            for r in range(size)
        ]
        for process in self._processes:
            process.start()

    def steps(self, count: int) -> tuple[list[float], float]:
        """Seconds of each step, and seconds of CPU of all processes together."""
        for commands in self._commands:
            commands.put(count)
        found = [times.get() for times in self._times]
        return [max(together) for together in zip(*(seconds for seconds, _ in found), strict=True)], sum(
            cpu for _, cpu in found
        )

    def close(self) -> None:
        for commands in self._commands:
            commands.put(None)
        for process in self._processes:
            process.join()


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    setup = Setup(args.hidden_size, args.layers, args.context, args.micro_batches, 2048)
    one = engine(setup, None, recompute=False)
    workers = LocalWorkers(2, SwarmConfig(csx_threads=1))
    two = engine(setup, workers, recompute=False)
    ddp = Ddp(setup, 2)
    found: dict[str, list[float]] = {"one": [], "two": [], "ddp": []}
    cpu_s = dict.fromkeys(found, 0.0)
    try:
        for measured in (False, *[True] * args.rounds):  # the first round warms up
            count = args.steps if measured else 1
            rounds = {
                "one": with_cpu(one, setup, count, []),
                "two": with_cpu(two, setup, count, workers.pool.process_ids),
                "ddp": ddp.steps(count),
            }
            for name, (times, cpu) in rounds.items() if measured else ():
                found[name] += times
                cpu_s[name] += cpu / (count * args.rounds)
    finally:
        ddp.close()
        workers.close()
    seconds = {name: statistics.median(times) for name, times in found.items()}
    best = {name: min(times) for name, times in found.items()}
    return {
        "parameters": one.graph.num_parameters,
        "tokens_per_step": args.micro_batches * MICRO_BATCH * args.context,
        "median_s": seconds,
        "best_s": best,
        "cpu_s_per_step_of_all_processes": cpu_s,
        # What two idle cores would give: the work of all processes spread over them.
        "two_against_one_by_cpu": cpu_s["one"] / (cpu_s["two"] / 2),
        "two_against_ddp_by_cpu": cpu_s["two"] / cpu_s["ddp"],
        "two_against_one": seconds["one"] / seconds["two"],
        "two_against_one_best": best["one"] / best["two"],
        "two_against_ddp": seconds["two"] / seconds["ddp"],
        "two_against_ddp_best": best["two"] / best["ddp"],
        "load_average": os.getloadavg()[0],
    }


def with_cpu(trained: Streamed, setup: Setup, steps: int, others: list[int]) -> tuple[list[float], float]:
    """Seconds of each step, and the seconds of CPU that this process and others spent on them."""
    before = time.process_time() + sum(map(cpu_of, others))
    result = timed_steps(trained, setup, steps)
    return result, time.process_time() + sum(map(cpu_of, others)) - before


def cpu_of(pid: int) -> float:
    fields_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields_[11]) + int(fields_[12])) / os.sysconf("SC_CLK_TCK")


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Proportional set size: a page that several processes map counts once, in equal parts."""
    torch.set_num_threads(1)
    setup = Setup(768, 4, 16, 4, 8192)
    found = {}
    for count in (1, 2, 4):
        workers = LocalWorkers(count, SwarmConfig(csx_threads=1))
        try:
            trained = engine(setup, workers, recompute=True)
            timed_steps(trained, setup, 2)
            wires = sum(4 * trained.graph.flat_elements(unit) for unit in trained.graph.units)
            pss = [dict(maps_of(pid)) for pid in workers.pool.process_ids]
            found[count] = {
                "weights_bytes": wires,
                "workers_pss_bytes": sum(sum(maps.values()) for maps in pss),
                "weights_pss_in_workers_bytes": sum(maps.get("weights", 0) for maps in pss),
                "weights_pss_bytes": sum(maps.get("weights", 0) for maps in pss)
                + dict(maps_of(os.getpid())).get("weights", 0),
            }
        finally:
            workers.close()
    return found


def maps_of(pid: int) -> Iterator[tuple[str, int]]:
    """Bytes by what they are: the shared weights, and the rest."""
    totals = {"weights": 0, "rest": 0}
    kind = "rest"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and not line.startswith(("Anon", "Pss", "Swap")):
            kind = "weights" if "memfd:openwafer-weights" in line else "rest"
        elif line.startswith("Pss:"):
            totals[kind] += int(line.split()[1]) * 1024
    yield from totals.items()


def many(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    setup = Setup(32, 2, 8, 17, 61)
    one = engine(setup, None, recompute=True)
    timed_steps(one, setup, 200)
    expected = {name: tensor.clone() for name, tensor in one.tensors()}
    found = {}
    for count in (8, 16):
        began = time.perf_counter()
        workers = LocalWorkers(count, SwarmConfig(csx_threads=1))
        try:
            trained = engine(setup, workers, recompute=True)
            started = time.perf_counter()
            timed_steps(trained, setup, 200)
            same = all(torch.equal(tensor, expected[name]) for name, tensor in trained.tensors())
        finally:
            workers.close()
        found[count] = {
            "steps": 200,
            "same_bits": same,
            "start_s": started - began,
            "steps_s": time.perf_counter() - started,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("scaling", "memory", "many"), default="scaling")
    parser.add_argument("--steps", type=int, default=4, help="steps per round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, in which all take turns")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--micro_batches", type=int, default=4)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    print(json.dumps({"scaling": scaling, "memory": memory, "many": many}[args.part](args), indent=1))


if __name__ == "__main__":
    main()
