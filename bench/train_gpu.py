"""Training beyond device memory on one GPU: `python bench/train_gpu.py`: ours, everything in HBM, FSDP2 offload.

Same model, batch, precision (bf16 compute, exact fp32 AdamW) and recomputation for all; median step in one run.
"""

import argparse
import gc
import os
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from openwafer.csx.cuda import CudaLink
from openwafer.graph import capture
from openwafer.graph.deferred import deferred, initialise
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.pinned import PinnedTier
from openwafer.memoryx.store import Store, fields
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.streamed import Streamed, fill

DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--micro_batch", type=int, default=None)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=["hbm", "ours", "guess", "redo", "clip", "fsdp"])
    args = parser.parse_args()
    config = ModelConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_heads=args.hidden // 128,
        vocab_size=args.vocab,
        max_position_embeddings=args.context,
        tie_word_embeddings=False,
    )
    runs = {
        "hbm": ("everything in HBM, fused AdamW on the GPU", in_hbm),
        "ours": ("streamed, updates during backward", lambda c, a: streamed(c, a, None)),
        "guess": ("streamed, speculative, no step clipped", lambda c, a: streamed(c, a, 1e9)),
        "redo": ("streamed, speculative, each step clipped", lambda c, a: streamed(c, a, 1e-6)),
        "clip": ("streamed, deferred clipping", lambda c, a: streamed(c, a, 1e9, speculates=False)),
        "fsdp": ("FSDP2, CPU offload, fused CPU AdamW", fsdp_offload),
    }
    base = None
    for name in args.only:
        title, run = runs[name]
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times, losses, parameters = run(config, args)
        median = statistics.median(times[2:])
        base = base or median
        peak = torch.cuda.max_memory_allocated() / 1e9
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # of this and all runs before: see --only
        tokens = args.samples * args.context
        print(
            f"{title:42} {median:.3f} s/step  {median / base:.2f} x first  {tokens / median / 1e3:6.1f}k tokens/s  "
            f"device peak {peak:5.1f} GB  host peak so far {host:5.1f} GB  {parameters / 1e9:.2f}B  "
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}  all {' '.join(f'{t:.3f}' for t in times)}",
            flush=True,
        )


def batch_of(args: argparse.Namespace, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step % 4)
    tokens = torch.randint(0, args.vocab, (args.samples, args.context + 1), generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def timed(step: Callable[[int], float], count: int) -> tuple[list[float], list[float]]:
    times, losses = [], []
    for index in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        losses.append(step(index))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times, losses


def streamed(
    config: ModelConfig, args: argparse.Namespace, max_norm: float | None, *, speculates: bool = True
) -> tuple:
    engine, link, parameters = make_streamed(config, args, max_norm, speculates)
    size = args.micro_batch or args.samples

    def step(index: int) -> float:
        batch = batch_of(args, index)
        parts = [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, args.samples, size)]
        return engine.step(parts).loss

    times, losses = timed(step, args.steps)
    link.drain()
    link.close()
    if link.updater.num_guesses_taken or link.updater.num_guesses_dropped:
        print(
            f"  updates begun early: {link.updater.num_guesses_taken} right, {link.updater.num_guesses_dropped} wrong"
        )
    return times, losses, parameters


def make_streamed(
    config: ModelConfig, args: argparse.Namespace, max_norm: float | None, speculates: bool = True
) -> tuple:
    with deferred():
        module = build(config)
    size = args.micro_batch or args.samples
    ids = torch.zeros(size, args.context, dtype=torch.int64, device="meta")
    graph = capture(module.train(), (), {"input_ids": ids, "labels": ids.clone()}, dtype=torch.bfloat16)
    optimizer_config = OptimizerConfig(lr=1e-4, max_grad_norm=max_norm)
    optimizer = make_optimizer(optimizer_config)
    tier = PinnedTier()
    store = Store(graph, optimizer, {spec.key: tier for spec in fields(graph, optimizer, "bf16")}, "bf16")
    fill(store, fast_values(graph))
    names = [name for name in graph.buffers if name not in graph.constants]
    buffers = {n: t.to(DEVICE) for n, t in initialise(module, names, 0)}
    buffers = {n: t.to(graph.buffers[n].dtype) for n, t in buffers.items()}
    link = CudaLink(store, DEVICE, can_veto=max_norm is not None, speculates=speculates)
    engine = Streamed(graph, store, buffers, optimizer_config, lambda step: 1.0, 0, 0, link)
    return engine, link, graph.num_parameters


def fast_values(graph):
    """Random weights made on the GPU: initialising two billion on the CPU would take longer than the bench."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, weight in graph.weights.items():
        if len(weight.spec.shape) < 2:
            yield name, torch.ones(weight.spec.shape)
        else:
            yield name, (torch.randn(weight.spec.shape, generator=generator, device=DEVICE) * 0.02).cpu()


class Checkpointed(nn.Module):
    """A block that recomputes its inside in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def plain_module(config: ModelConfig, device: torch.device) -> nn.Module:
    with device:
        module = build(config)
    inner = module.get_submodule("transformer")
    inner.h = nn.ModuleList(Checkpointed(block) for block in inner.h)  # pyright: ignore
    return module.train()


def in_hbm(config: ModelConfig, args: argparse.Namespace) -> tuple:
    module = plain_module(config, DEVICE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(index: int) -> float:
        batch = {k: v.to(DEVICE) for k, v in batch_of(args, index).items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            total, count = module(**batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        return (total / count).item()

    return *timed(step, args.steps), sum(p.numel() for p in module.parameters())


def fsdp_offload(config: ModelConfig, args: argparse.Namespace) -> tuple:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    module = plain_module(config, torch.device("cpu"))
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "offload_policy": CPUOffloadPolicy()}
    for block in module.get_submodule("transformer").h:  # pyright: ignore
        fully_shard(block, **policy)
    fully_shard(module, **policy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(index: int) -> float:
        batch = {k: v.to(DEVICE) for k, v in batch_of(args, index).items()}
        total, count = module(**batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        return (total / count).item()

    result = *timed(step, args.steps), sum(p.numel() for p in module.parameters())
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
