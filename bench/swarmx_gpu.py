"""Several workers on the GPUs of this host give the bits of one: `python bench/swarmx_gpu.py [--steps 10]`.

Trains a small model with 1, 2 and 4 workers (on one GPU they share it), compares weights and optimizer state to the bit
and prints the median step, without clipping and with it (one worker takes the norm on the GPU, several on the host).
"""

import argparse
import statistics
import time

import torch
from torch import Tensor

from openwafer.graph import capture
from openwafer.graph.deferred import deferred, initialise
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import close_tiers, place
from openwafer.memoryx.store import Store
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.swarmx.config import SwarmConfig
from openwafer.train.gpu import GpuWorker
from openwafer.train.gpu_workers import GpuWorkers
from openwafer.train.streamed import Streamed, fill
from openwafer.train.workers import LocalWorkers

VOCABULARY = 1024


def micro_batches(step: int, args: argparse.Namespace) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (args.batch, args.context), generator=generator)
    return [{"input_ids": part, "labels": (part * 5 + 3) % VOCABULARY} for part in ids.split(args.micro_batch)]


def workers_of(num_csx: int, args: argparse.Namespace, config: OptimizerConfig) -> LocalWorkers | GpuWorker:
    if args.device == "cpu":
        return LocalWorkers(num_csx, SwarmConfig())
    return GpuWorker(None, config) if num_csx == 1 else GpuWorkers(num_csx, SwarmConfig(), None)


def trained(
    num_csx: int, args: argparse.Namespace, max_grad_norm: float | None
) -> tuple[dict[str, Tensor], list[float], float]:
    """(weights, buffers and optimizer state; losses; median seconds of a step)."""
    with deferred():
        module = build(
            ModelConfig(
                family="llama",
                hidden_size=args.hidden,
                num_hidden_layers=args.layers,
                num_heads=8,
                vocab_size=VOCABULARY,
                max_position_embeddings=args.context,
            )
        )
    wire, dtype = ("bf16", torch.bfloat16) if args.device == "cuda" else ("fp32", None)
    graph = capture(module.train(), (), micro_batches(0, args)[0], dtype=dtype)
    config, memory = OptimizerConfig(lr=1e-3, max_grad_norm=max_grad_norm), MemoryConfig()
    optimizer = make_optimizer(config)
    workers = workers_of(num_csx, args, config)
    tiers = {}
    try:
        if isinstance(workers, GpuWorker | GpuWorkers):
            workers.check(graph, args.batch // args.micro_batch)
        tiers = workers.open_tiers(place(graph, optimizer, memory, wire), memory)
        store = Store(graph, optimizer, tiers, wire)
        fill(store, initialise(module, graph.weights, 0))
        names = [name for name in graph.buffers if name not in graph.constants]
        buffers = {name: value.to(graph.buffers[name].dtype) for name, value in initialise(module, names, 0)}
        link, swarm = workers.attach(graph, store, 0, {})
        return stepped(Streamed(graph, store, buffers, config, lambda step: 1.0, link=link, swarm=swarm), args)
    finally:
        workers.close()
        close_tiers(tiers)


def stepped(engine: Streamed, args: argparse.Namespace) -> tuple[dict[str, Tensor], list[float], float]:
    seconds: list[float] = []
    losses: list[float] = []
    for step in range(args.steps):
        began = time.perf_counter()
        losses.append(engine.step(micro_batches(step, args)).loss)
        seconds.append(time.perf_counter() - began)
    state = {name: tensor.clone() for name, tensor in engine.tensors()}
    return state, losses, statistics.median(seconds[2:] or seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--num_csx", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=0.5)
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    print(f"device {args.device}, {num_gpus} GPUs, {args.steps} steps of {args.batch} x {args.context} tokens")
    if not all([is_same(args, max_grad_norm) for max_grad_norm in (None, args.max_grad_norm)]):
        raise SystemExit("the bits depend on the number of workers")


def is_same(args: argparse.Namespace, max_grad_norm: float | None) -> bool:
    runs = {num_csx: trained(num_csx, args, max_grad_norm) for num_csx in args.num_csx}
    first, (expected, expected_losses, _) = next(iter(runs.items()))
    found = True
    for num_csx, (state, losses, seconds) in runs.items():
        different = [name for name in expected if not torch.equal(state[name], expected[name])]
        equal = not different and losses == expected_losses
        found = found and equal
        text = f"clipping {max_grad_norm}, num_csx {num_csx}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
        text += f"step {seconds * 1e3:.1f} ms, bit-equal to num_csx {first}: {equal}"
        text += f" ({len(different)} of {len(expected)} tensors differ, {different[0]} first)" if different else ""
        print(text, flush=True)
    return found


if __name__ == "__main__":
    main()
