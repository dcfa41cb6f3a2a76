"""Checkpoints: their write rate against the disk's, and how long training stalls for one.

    python bench/checkpoint.py [--folder DIR] [--hidden_size 1024] [--layers 16] [--steps 4] [--repeats 3]
    python bench/checkpoint.py --device cuda --hidden_size 2048 --layers 20 --tokens 2048 --samples 8 --steps 30

The default is a GPT of 200M parameters with AdamW state: 2.4 GB; `--hidden_size 2048 --layers 20` is one of 1B,
12 GB. The floor is the disk: one file of the same size written front to back with O_DIRECT, before and after each
checkpoint; the ratio is the median over the repeats. Writing a checkpoint is bound by the disk or by the cores that
hash it: `cpu_limit_gb_s` is what all cores together could hash, copy and write. The stall is how much longer the same
steps take with a checkpoint begun before them, in steps; where cores are few that includes the cores' share that
hashing and writing take. The first checkpoint's is told apart: it is the first to touch the memory for copies, which a
virtual machine has to ask its host for.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from openwafer import checkpoint
from openwafer.direct_io import aligned_bytes, bytes_of, has_direct, opened, write_fully
from openwafer.graph import capture
from openwafer.graph.deferred import deferred, initialise
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import close_tiers, open_tiers, place
from openwafer.memoryx.store import Store
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.gpu import GpuWorker
from openwafer.train.saver import Saver
from openwafer.train.streamed import Streamed, fill

CHUNK_BYTES = 8 << 20


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Bytes per second of a new file, until it is on disk."""
    chunk = aligned_bytes(CHUNK_BYTES)
    memory = bytes_of(chunk.random_(0, 256))  # virtual disks write zeros faster than anything else
    path = folder / "sequential"
    began = time.perf_counter()
    with opened(path, os.O_WRONLY | os.O_CREAT, direct=has_direct(folder)) as descriptor:
        for offset in range(0, num_bytes, CHUNK_BYTES):
            write_fully(descriptor, memory, offset)
        os.fsync(descriptor)
    seconds = time.perf_counter() - began
    path.unlink()
    return num_bytes / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: temporary files)")
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="per sample")
    parser.add_argument("--samples", type=int, default=1, help="per step, each a micro-batch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=4, help="steps with and without a checkpoint")
    parser.add_argument("--repeats", type=int, default=3, help="checkpoints whose rate is measured")
    parser.add_argument("--snapshot", type=int, default=None, help="bytes for copies of what training changes")
    args = parser.parse_args()
    model = ModelConfig(
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_heads=args.hidden_size // 64,
        vocab_size=256,
        max_position_embeddings=args.tokens,
    )
    with deferred():
        module = build(model)
    ids = torch.randint(0, 256, (1, args.tokens))
    batch = {"input_ids": ids, "labels": ids.clone()}
    on_gpu = args.device == "cuda"
    graph = capture(module.train(), (), batch, dtype=torch.bfloat16 if on_gpu else None)
    config, memory = OptimizerConfig(), MemoryConfig(snapshot=args.snapshot)
    optimizer, wire = make_optimizer(config), "bf16" if on_gpu else "fp32"
    placement, link = place(graph, optimizer, memory, wire), None
    worker = GpuWorker(None, config) if on_gpu else None
    if worker is not None:
        worker.check(graph, args.samples)
    tiers = open_tiers(placement, memory) if worker is None else worker.open_tiers(placement, memory)
    store = Store(graph, optimizer, tiers, wire)
    fill(store, initialise(module, graph.weights, 0))
    if worker is not None:
        link, _ = worker.attach(graph, store, 0, {})
    engine = Streamed(graph, store, {}, config, lambda step: 1.0, link=link)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        result = measure(engine, [batch] * args.samples, Path(name), placement.dram_bytes, args.steps, args.repeats)
    if worker is not None:
        worker.close()
    close_tiers(tiers)
    print(json.dumps({"parameters": graph.num_parameters, **result}, indent=1))


def measure(
    engine: Streamed, micro_batches: list[dict], folder: Path, num_bytes: int, steps: int, repeats: int
) -> dict[str, float]:
    def seconds_of_steps() -> float:
        ends = [time.perf_counter()]
        for _ in range(steps):
            engine.step(micro_batches)
            ends.append(time.perf_counter())
        each = [f"{end - begin:.3f}" for begin, end in itertools.pairwise(ends)]
        print(f"steps of {' '.join(each)} s", file=sys.stderr)
        return ends[-1] - ends[0]

    saver = Saver(lambda step, tensors: checkpoint.save(folder / str(step), step, tensors, {}, keep=1), print)
    engine.step(micro_batches)
    rates, disks, ratios, used = [], [disk_rate(folder, num_bytes)], [], []
    for number in range(repeats):
        began, cpu = time.perf_counter(), time.process_time()
        saver.save_now(number, engine.freeze)
        rates.append(num_bytes / (time.perf_counter() - began))
        used.append(time.process_time() - cpu)
        shutil.rmtree(folder / str(number))  # not timed: some file systems take long to forget
        disks.append(disk_rate(folder, num_bytes))
        ratios.append(rates[-1] / statistics.mean(disks[-2:]))
    plain, stalls, took = [seconds_of_steps()], [], []
    for number in range(repeats, 2 * repeats + 1):
        began = time.perf_counter()
        saver.start(number, engine.freeze)
        with_checkpoint = seconds_of_steps()
        saver.wait()
        took.append(time.perf_counter() - began)
        shutil.rmtree(folder / str(number))
        plain.append(seconds_of_steps())
        stalls.append(with_checkpoint / statistics.mean(plain[-2:]) * steps - steps)
    saver.close()
    cpu_s = statistics.median(used)
    return {
        "bytes": num_bytes,
        "disk_write_gb_s": round(statistics.median(disks) / 1e9, 3),
        "checkpoint_gb_s": round(statistics.median(rates) / 1e9, 3),
        "ratio": round(statistics.median(ratios), 3),
        "best_ratio": round(max(ratios), 3),
        "target_ratio": 0.7,
        "cpu_s_per_gb": round(cpu_s / (num_bytes / 1e9), 3),
        "cpu_limit_gb_s": round((os.cpu_count() or 1) * num_bytes / cpu_s / 1e9, 3),
        "load": round(os.getloadavg()[0], 1),
        "step_s": round(statistics.median(plain) / steps, 3),
        "background_save_s": round(statistics.median(took[1:]), 3),
        "first_stall_steps": round(stalls[0], 3),
        "stall_steps": round(statistics.median(stalls[1:]), 3),
        "target_stall_steps": 1.0,
    }


if __name__ == "__main__":
    main()
