"""Streamed from the host equals everything in HBM, bit for bit: `python bench/same_bits_gpu.py [--steps 200]`."""

import argparse
from pathlib import Path

import torch

from openwafer.csx.cuda import CudaLink
from openwafer.csx.link import DirectLink
from openwafer.graph import capture
from openwafer.kernels.squares import square_sums, square_sums_reference
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.pinned import PinnedTier
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier, Key
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.streamed import Streamed, fill

DEVICE = torch.device("cuda")


class DeviceTier(DramTier):
    """Everything in the GPU's memory."""

    def create(self, key: Key, num_elements: int, dtype: torch.dtype) -> None:
        self._arrays[key] = torch.zeros(num_elements, dtype=dtype, device=DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    # Real text without any download: the sources of this package, byte by byte.
    files = sorted(Path(__file__).parents[1].glob("openwafer/**/*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    check_squares()
    for max_norm in (None, 0.5):
        check(text, args.steps, max_norm)


def check_squares() -> None:
    """The sums that the norm is made of, on the GPU and on the host."""
    for dtype in (torch.float32, torch.bfloat16):
        for length in (768, 16384, 5 * 16384 + 1001, 1 << 26):
            generator = torch.Generator().manual_seed(length)
            gradient = torch.randn(length, generator=generator).exp().to(dtype)
            on_gpu = gradient.to(DEVICE)
            for sums in (square_sums(on_gpu), square_sums_reference(on_gpu)):
                assert torch.equal(sums.cpu(), square_sums(gradient)), (dtype, length)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(10):
        square_sums(on_gpu)
    ended.record()
    ended.synchronize()
    rate = 10 * on_gpu.nbytes / began.elapsed_time(ended) / 1e6
    print(f"sums of squares: all bits equal to the host's, {rate:.0f} GB/s", flush=True)


def check(text: torch.Tensor, steps: int, max_norm: float | None) -> None:
    torch.manual_seed(0)
    module = build(
        ModelConfig(
            family="llama",
            hidden_size=512,
            num_hidden_layers=6,
            num_heads=8,
            vocab_size=256,
            max_position_embeddings=256,
        )
    ).train()
    ids = torch.zeros(4, 256, dtype=torch.int64)
    graph = capture(module, (), {"input_ids": ids, "labels": ids.clone()}, dtype=torch.bfloat16)
    config = OptimizerConfig(lr=1e-3, max_grad_norm=max_norm)
    optimizer = make_optimizer(config)
    specs = fields(graph, optimizer, "bf16")
    engines = []
    for tier, streamed in ((PinnedTier(), True), (DeviceTier(), False)):
        store = Store(graph, optimizer, {spec.key: tier for spec in specs}, "bf16")
        fill(store, ((name, module.get_parameter(name).detach()) for name in graph.weights))
        link = CudaLink(store, DEVICE, can_veto=max_norm is not None) if streamed else DirectLink(store, DEVICE)
        buffers = {n: module.get_buffer(n).to(DEVICE, graph.buffers[n].dtype) for n in graph.buffers}
        engines.append(Streamed(graph, store, buffers, config, lambda step: 1.0, 0, 0, link))
    plain = module.to(DEVICE)
    matrices = [p for p in plain.parameters() if p.dim() >= 2]
    others = [p for p in plain.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    ordinary = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    first = last = 0.0
    ours: list[float] = []
    theirs: list[float] = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(text) - 257, (2, 4), generator=generator)
        batches = []
        for row in starts:
            runs = torch.stack([text[s : s + 257] for s in row.tolist()])
            batches.append({"input_ids": runs[:, :-1].contiguous(), "labels": runs[:, 1:].contiguous()})
        a, b = (engine.step(batches) for engine in engines)
        assert a.loss == b.loss, (step, a, b)
        first, last = (a.loss if step == 0 else first), a.loss
        ours.append(a.loss)
        if max_norm is None:
            theirs.append(ordinary_step(plain, ordinary, batches))
    found = [{n: t.cpu().clone() for n, t in engine.tensors()} for engine in engines]
    same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    print(f"clipping {max_norm}: {steps} steps, loss {first:.3f} -> {last:.3f}, all bits equal to in-HBM: {same}")
    if max_norm is None:
        differences = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
        mean = abs(sum(ours[-20:]) / sum(theirs[-20:]) - 1)
        print(
            f"ordinary PyTorch (autocast): loss {theirs[-1]:.4f} against {last:.4f}; the mean of the last 20 losses "
            f"differs by {mean:.2e}, single losses by {sorted(differences)[len(differences) // 2]:.2e} in the "
            f"median and {max(differences):.2e} at most"
        )
        assert mean < 1e-2
    assert same
    assert last < 0.7 * first


def ordinary_step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list) -> float:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        results = [module(**{k: v.to(DEVICE) for k, v in batch.items()}) for batch in batches]
    loss = torch.stack([r[0] for r in results]).sum() / torch.stack([r[1] for r in results]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    main()
