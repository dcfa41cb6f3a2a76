"""A 13B model on one GPU with 20 GB of its memory, DRAM and flash: `python bench/train_13b.py --flash DIR`.

Prints the steps beside their floor: the larger of the bytes that go to and from flash at the disk's own rates, and the
time the GPU computes. The disk's rates are measured in the same run, before the first step and after the last: the
floor takes their mean. The first step is none to judge by: it reads files that are still holes, and touches the
optimizer state in DRAM for the first time.
"""

import argparse
import resource
import time
from pathlib import Path

import torch
from flash import disk_rates
from train_gpu import batch_of, fast_values

from openwafer import timeline
from openwafer.config import parse_size
from openwafer.csx.cuda import CudaLink
from openwafer.graph import Graph, capture
from openwafer.graph.deferred import deferred
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.flash import FlashTier
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import close_tiers, place
from openwafer.memoryx.store import Store
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.gpu import GpuWorker
from openwafer.train.streamed import Streamed, fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flash", type=Path, required=True)
    parser.add_argument("--dram", default="104GiB")
    parser.add_argument("--device_memory", default="20GB")
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--disk", default="3GiB", help="size of the file that the disk's rates are measured with")
    args = parser.parse_args()
    args.flash.mkdir(parents=True, exist_ok=True)
    before = measured_rates(args)
    with deferred():
        module = build(
            ModelConfig(
                hidden_size=args.hidden,
                num_hidden_layers=args.layers,
                num_heads=args.hidden // 128,
                vocab_size=args.vocab,
                max_position_embeddings=args.context,
                tie_word_embeddings=False,
            )
        )

    def make_graph(size: int) -> Graph:
        ids = torch.zeros(size, args.context, dtype=torch.int64, device="meta")
        return capture(module.train(), (), {"input_ids": ids, "labels": ids.clone()}, dtype=torch.bfloat16)

    config = OptimizerConfig(lr=1e-4)
    worker = GpuWorker(parse_size(args.device_memory), config)
    size = worker.fit(make_graph, args.samples, None)
    graph, optimizer = make_graph(size), make_optimizer(config)
    memory = MemoryConfig(dram=parse_size(args.dram), flash=args.flash)
    placement = place(graph, optimizer, memory, "bf16")
    print(
        f"{graph.num_parameters / 1e9:.2f}B parameters; {placement}; micro-batches of {size}; {worker.footprint}",
        flush=True,
    )
    tiers = worker.open_tiers(placement, memory)
    try:
        store = Store(graph, optimizer, tiers, "bf16")
        began = time.perf_counter()
        fill(store, fast_values(graph))
        print(f"weights filled in {time.perf_counter() - began:.0f} s", flush=True)
        link, _ = worker.attach(graph, store, 0, {})
        torch.cuda.reset_peak_memory_stats()  # filling and fitting are not part of a step
        engine = Streamed(graph, store, {}, config, lambda step: 1.0, link=link)
        steps = run(engine, link, args, size, next(tier for tier in tiers.values() if isinstance(tier, FlashTier)))
        after = measured_rates(args)
        # Optimizer state on flash is read and written once per step.
        flash_s = sum(2 * placement.flash_bytes / (before[kind] + after[kind]) for kind in ("read", "write"))
        report(steps, flash_s)
    finally:
        worker.close()
        close_tiers(tiers)


def measured_rates(args: argparse.Namespace) -> dict[str, float]:
    rates = disk_rates(args.flash, parse_size(args.disk))
    print(f"disk: read {rates['read'] / 1e9:.2f} GB/s, write {rates['write'] / 1e9:.2f} GB/s", flush=True)
    return rates


def report(steps: list[tuple[float, float]], flash_s: float) -> None:
    for index, (step_s, compute_s) in enumerate(steps):
        floor_s = max(flash_s, compute_s)
        print(
            f"step {index + 1}: {step_s:.1f} s, floor {floor_s:.1f} s (flash {flash_s:.1f} s, compute {compute_s:.1f} "
            f"s): {step_s / floor_s:.2f} x"
        )


def run(
    engine: Streamed, link: CudaLink, args: argparse.Namespace, size: int, flash: FlashTier
) -> list[tuple[float, float]]:
    """Seconds of each step, and of what the GPU computed in it."""
    steps = []
    with timeline.Timeline() as times:
        for index in range(args.steps):
            batch = batch_of(args, index)
            parts = [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, args.samples, size)]
            moved, began = flash.num_bytes_moved, time.perf_counter()
            with times.step(index + 1):
                loss = engine.step(parts).loss
                link.drain()
            step_s = time.perf_counter() - began
            assert times.last is not None
            steps.append((step_s, times.last.by_lane.get(timeline.COMPUTE, 0.0)))
            read, written = (now - then for now, then in zip(flash.num_bytes_moved, moved, strict=True))
            host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(
                f"step {index + 1}: {step_s:.1f} s; loss {loss:.3f}; read {read / 1e9:.1f} GB, written "
                f"{written / 1e9:.1f} GB; device peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB; host peak "
                f"{host:.1f} GB; {times.last.shares()}",
                flush=True,
            )
    return steps


if __name__ == "__main__":
    main()
