"""The flash tier: its rate against the disk's, and training under a third of the state in DRAM.

    python bench/flash.py [--folder DIR] [--size 1GiB] [--array 32MiB] [--hidden_size 384] [--layers 12]

First the disk's own rate: one file read and written front to back with O_DIRECT. Then a pass over arrays in the
flash tier, each loaded, changed and released, as the optimizer does: every byte is read once and written once.
The disk's rate for that mix is what the same reads and writes take when it does them at its own rates. The same
through memory in small pages shows what huge ones are for.
Last, training of a GPT with a third of its state in DRAM against all of it there.
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from openwafer.config import parse_size
from openwafer.direct_io import aligned_bytes, bytes_of, has_direct, opened, read_fully, write_fully
from openwafer.graph import Graph, capture
from openwafer.graph.deferred import deferred, initialise
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.flash import FlashTier
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import close_tiers, open_tiers, place
from openwafer.memoryx.store import Store, fields
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.streamed import Streamed, fill

CHUNK_BYTES = 8 << 20
# As large as an array: a virtual disk copies faster from and to the processor's caches.
BUFFER_BYTES = 256 << 20
TARGET = 0.80


def disk_rates(folder: Path, num_bytes: int, buffer: torch.Tensor | None = None) -> dict[str, float]:
    """Bytes per second of one sequential reader and of one writer, through memory as the tier has it or `buffer`."""
    direct = has_direct(folder)
    if not direct:
        print(f"note: {folder} has no O_DIRECT, so the page cache takes part", file=sys.stderr)
    buffer = aligned_bytes(BUFFER_BYTES) if buffer is None else buffer
    memory = bytes_of(buffer.random_(0, 256))  # virtual disks write zeros faster than anything else
    path = folder / "sequential"
    rates = {}
    # The first writing also allocates: rates are of a file that is there, as the tier's files are after a pass.
    for kind in ("allocate", "write", "read"):
        flags = os.O_RDONLY if kind == "read" else os.O_WRONLY | os.O_CREAT
        began = time.perf_counter()
        with opened(path, flags, direct=direct) as descriptor:
            for offset in range(0, num_bytes, CHUNK_BYTES):
                chunk = memory[offset % BUFFER_BYTES :][:CHUNK_BYTES]
                (read_fully if kind == "read" else write_fully)(descriptor, chunk, offset)
            if kind != "read":
                os.fdatasync(descriptor)
        rates[kind] = num_bytes / (time.perf_counter() - began)
    path.unlink()
    return rates


def small_pages() -> torch.Tensor:
    """A buffer in pages of the usual size: what the tier would have without huge ones."""
    pages = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def tier_pass(
    tier: FlashTier, keys: list[tuple[int, str]], *, change: bool, content: torch.Tensor | None = None
) -> float:
    """Seconds for all arrays once. The first time they are given content: they start as zeros."""
    began = time.perf_counter()
    for index, key in enumerate(keys):
        for coming in keys[index : index + 3]:
            tier.prefetch(coming)
        array = tier.load(key)
        if content is not None:
            array.copy_(content)
        elif change:
            array[0] += 1
        tier.release(key, changed=change)
    tier.flush()
    return time.perf_counter() - began


def tier_rates(folder: Path, num_bytes: int, array_bytes: int) -> dict[str, float]:
    """Bytes per second of passes that read, and that read and write back."""
    tier = FlashTier(folder / "tier", 6 * array_bytes)
    keys = [(index, "m") for index in range(num_bytes // array_bytes)]
    for key in keys:
        tier.create(key, array_bytes // 4, torch.float32)
    tier_pass(tier, keys, change=True, content=torch.rand(array_bytes // 4))  # allocates
    moved = len(keys) * array_bytes
    rates = {
        "read": moved / tier_pass(tier, keys, change=False),
        "read and write": 2 * moved / tier_pass(tier, keys, change=True),
    }
    tier.close()
    return rates


def step_seconds(graph: Graph, module: torch.nn.Module, memory: MemoryConfig, batch: dict, steps: int) -> float:
    config = OptimizerConfig()
    optimizer = make_optimizer(config)
    placement = place(graph, optimizer, memory)
    print(f"  {placement}", file=sys.stderr)
    tiers = open_tiers(placement, memory)
    store = Store(graph, optimizer, tiers)
    fill(store, initialise(module, graph.weights, 0))
    engine = Streamed(graph, store, {}, config, lambda step: 1.0)
    seconds = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        engine.step([batch])
        seconds.append(time.perf_counter() - began)
    close_tiers(tiers)
    return statistics.median(seconds[2:])


def training(folder: Path, hidden_size: int, layers: int, tokens: int, steps: int) -> dict[str, float]:
    with deferred():
        module = build(
            ModelConfig(
                hidden_size=hidden_size,
                num_hidden_layers=layers,
                num_heads=hidden_size // 64,
                vocab_size=2048,
                max_position_embeddings=256,
            )
        )
    ids = torch.randint(0, 2048, (tokens // 256, 256))
    batch = {"input_ids": ids, "labels": ids.clone()}
    graph = capture(module.train(), (), batch)
    state = sum(spec.num_bytes for spec in fields(graph, make_optimizer(OptimizerConfig())))
    in_dram = step_seconds(graph, module, MemoryConfig(), batch, steps)
    third = step_seconds(graph, module, MemoryConfig(dram=state // 3, flash=folder / "train"), batch, steps)
    return {"parameters": graph.num_parameters, "dram_step_s": in_dram, "third_step_s": third}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: temporary files)")
    parser.add_argument("--size", default="1GiB", help="bytes on flash")
    parser.add_argument("--array", default="32MiB", help="bytes per array")
    parser.add_argument("--hidden_size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256, help="per step")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        num_bytes, array_bytes = parse_size(args.size), parse_size(args.array)
        before = disk_rates(folder, num_bytes)
        tier = tier_rates(folder, num_bytes, array_bytes)
        after = disk_rates(folder, num_bytes)
        disk = {kind: (before[kind] + after[kind]) / 2 for kind in before}
        small = disk_rates(folder, num_bytes, small_pages())
        both = 2 / (1 / disk["read"] + 1 / disk["write"])
        result = {
            "disk_read_gb_s": disk["read"] / 1e9,
            "disk_write_gb_s": disk["write"] / 1e9,
            "disk_read_small_pages_gb_s": small["read"] / 1e9,
            "disk_write_small_pages_gb_s": small["write"] / 1e9,
            "tier_read_gb_s": tier["read"] / 1e9,
            "tier_read_write_gb_s": tier["read and write"] / 1e9,
            "read_ratio": tier["read"] / disk["read"],
            "read_write_ratio": tier["read and write"] / both,
            "target_ratio": TARGET,
            **training(folder, args.hidden_size, args.layers, args.tokens, args.steps),
        }
    print(json.dumps({key: round(value, 3) for key, value in result.items()}, indent=1))


if __name__ == "__main__":
    main()
