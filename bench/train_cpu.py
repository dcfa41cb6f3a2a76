"""Streamed training on a CPU against a plain in-memory loop: `python bench/train_cpu.py [--steps N]`.

The same model, batch, precision (fp32) and threads in one process. Steps of the two take turns, so that whatever else
the machine does meets both; the ratio is the median of the ratios of neighbours. Two pairs: activations kept on both
sides, and recomputed on both sides (ours per Unit, theirs with torch.utils.checkpoint per block).

On a machine that others use too, look at the ratio of CPU seconds, with OMP_WAIT_POLICY=passive (else a thread that
waits for another counts as busy).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from train_gpu import Checkpointed

from openwafer.graph import capture
from openwafer.graph.deferred import deferred, initialise
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.streamed import Streamed, fill

Batch = dict[str, Tensor]
Step = Callable[[Batch], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=24000)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=15, help="of each side, after two that are not counted")
    parser.add_argument("--only", nargs="*", choices=["kept", "recomputed"], default=["kept", "recomputed"])
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    args = parser.parse_args()
    rows = [measure(args, recompute=name == "recomputed") for name in args.only]
    if args.out is not None:
        args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def measure(args: argparse.Namespace, *, recompute: bool) -> dict[str, Any]:
    config = ModelConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_heads=args.hidden // 64,
        vocab_size=args.vocab,
        max_position_embeddings=args.context,
    )
    sides: dict[str, Step] = {
        "streamed": streamed(config, args, recompute=recompute),
        "in memory": in_memory(config, recompute=recompute),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu_times: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(args.steps + 2):
        batch = batch_of(args, index)
        # Who goes first alternates: the second finds the caches as the first leaves them.
        for name in list(sides) if index % 2 else reversed(list(sides)):
            began, cpu_began = time.perf_counter(), time.process_time()
            losses[name].append(sides[name](batch))
            times[name].append(time.perf_counter() - began)
            cpu_times[name].append(time.process_time() - cpu_began)
    ours, theirs = times["streamed"][2:], times["in memory"][2:]
    ratios, cpu_ratios = ratios_of(times), ratios_of(cpu_times)
    gap = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    row: dict[str, Any] = {
        "activations": "recomputed" if recompute else "kept",
        "num_threads": torch.get_num_threads(),
        "streamed_s": round(statistics.median(ours), 4),
        "in_memory_s": round(statistics.median(theirs), 4),
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "cpu_quartiles": [round(cpu_ratios[len(cpu_ratios) // 4], 3), round(cpu_ratios[-1 - len(cpu_ratios) // 4], 3)],
        "fastest_ratio": round(min(ours) / min(theirs), 3),
        "largest_loss_difference": gap,
    }
    print(
        f"activations {row['activations']:10}  streamed {row['streamed_s']:.3f} s/step  "
        f"in memory {row['in_memory_s']:.3f} s/step  {row['num_threads']} threads\n"
        f"    ratio {row['ratio']:.3f} (middle half {low:.3f} to {high:.3f}, "
        f"fastest of each {row['fastest_ratio']:.3f}), "
        f"of CPU seconds {row['cpu_ratio']:.3f} (middle half {' to '.join(map(str, row['cpu_quartiles']))}); "
        f"losses differ by {gap:.1e}",
        flush=True,
    )
    return row


def ratios_of(times: dict[str, list[float]]) -> list[float]:
    """Ours over theirs of each pair of neighbours that counts, the smallest first."""
    pairs = zip(times["streamed"][2:], times["in memory"][2:], strict=True)
    return sorted(ours / theirs for ours, theirs in pairs)


def batch_of(args: argparse.Namespace, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, args.vocab, (args.samples, args.context + 1), generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def streamed(config: ModelConfig, args: argparse.Namespace, *, recompute: bool) -> Step:
    with deferred():
        module = build(config)
    ids = torch.zeros(args.samples, args.context, dtype=torch.int64, device="meta")
    graph = capture(module.train(), (), {"input_ids": ids, "labels": ids.clone()})
    optimizer_config = OptimizerConfig(lr=1e-4)
    optimizer = make_optimizer(optimizer_config)
    dram = DramTier()
    store = Store(graph, optimizer, {spec.key: dram for spec in fields(graph, optimizer)})
    fill(store, initialise(module, graph.weights, 0))
    buffers = dict(initialise(module, [name for name in graph.buffers if name not in graph.constants], 0))
    engine = Streamed(graph, store, buffers, optimizer_config, lambda step: 1.0, 0, recompute=recompute)
    return lambda batch: engine.step([batch]).loss


def in_memory(config: ModelConfig, *, recompute: bool) -> Step:
    """The usual loop, started from the same weights as the other side."""
    with deferred():
        source = build(config)
    module = build(config).train()
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    with torch.no_grad():
        for name, value in initialise(source, names, 0):
            module.state_dict(keep_vars=True)[name].copy_(value)
    if recompute:
        inner = module.get_submodule("transformer")
        inner.h = nn.ModuleList(Checkpointed(block) for block in inner.h)  # pyright: ignore
    matrices = [weight for weight in module.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in module.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(batch: Batch) -> float:
        total, count = module(**batch)
        loss = total / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


if __name__ == "__main__":
    main()
