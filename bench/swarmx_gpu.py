"""Several workers on the GPUs of this host give the bits of one: `python bench/swarmx_gpu.py [--steps 10]`.

Trains a small model with 1, 2 and 4 workers (on one GPU they share it), compares weights and optimizer state to the bit
and prints the median step. Without clipping all must agree. With clipping (`--max_grad_norm`) one worker takes the norm
on the GPU and several on the host, so only several are compared with each other.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor

import openwafer as ow
from openwafer.models.build import build
from openwafer.models.config import ModelConfig

VOCABULARY = 1024


def batch(step: int, args: argparse.Namespace) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (args.batch, args.context), generator=generator)
    return {"input_ids": ids, "labels": (ids * 5 + 3) % VOCABULARY}


def trained(num_csx: int, args: argparse.Namespace) -> tuple[dict[str, Tensor], list[float], float]:
    """(weights, buffers and optimizer state; losses; median seconds of a step)."""
    config = ModelConfig(
        family="llama",
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=args.context,
    )
    with ow.deferred():
        model = build(config)
    cluster = ow.Cluster(num_csx=num_csx, device=args.device)
    optimizer = ow.AdamW(lr=1e-3, max_grad_norm=args.max_grad_norm)
    seconds: list[float] = []
    losses: list[float] = []
    with ow.Trainer(model, optimizer, cluster, micro_batch_size=args.micro_batch) as job:
        for step in range(args.steps):
            began = time.perf_counter()
            losses.append(job.step(batch(step, args)))
            seconds.append(time.perf_counter() - began)
        assert job._engine is not None
        state = {name: tensor.clone() for name, tensor in job._engine.tensors()}
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
    parser.add_argument("--max_grad_norm", type=float, default=None)
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    print(f"device {args.device}, {num_gpus} GPUs, {args.steps} steps of {args.batch} x {args.context} tokens")
    runs = {num_csx: trained(num_csx, args) for num_csx in args.num_csx}
    compared = [n for n in args.num_csx if args.device == "cpu" or args.max_grad_norm is None or n > 1]
    first = compared[0]
    is_same = True
    for num_csx, (state, losses, seconds) in runs.items():
        text = f"num_csx {num_csx}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, step {seconds * 1e3:.1f} ms"
        if num_csx in compared:
            expected, expected_losses, _ = runs[first]
            different = [name for name in expected if not torch.equal(state[name], expected[name])]
            equal = not different and losses == expected_losses
            is_same = is_same and equal
            text += f", bit-equal to num_csx {first}: {equal}"
            text += f" ({len(different)} of {len(expected)} tensors differ, {different[0]} first)" if different else ""
        print(text, flush=True)
    if not is_same:
        raise SystemExit("the bits depend on the number of workers")


if __name__ == "__main__":
    main()
