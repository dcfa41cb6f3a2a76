"""The optimizer pass of MemoryX: `python bench/adamw.py`: ours, torch's fused AdamW, and the copy floor."""

import argparse
import time

import torch

from openwafer.kernels.adamw import AdamWStep, Halves, adamw
from openwafer.kernels.compiled import library
from openwafer.memoryx.wire import split
from openwafer.pages import zeros


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=100, help="parameters, in millions")
    parser.add_argument("--threads", type=int, nargs="*", default=[torch.get_num_threads()])
    args = parser.parse_args()
    n = args.millions * 1_000_000
    print(f"{args.millions}M parameters, C kernel {'built' if library('adamw') else 'missing: reference runs'}")
    source, target = torch.randn(n), torch.empty(n)
    copy_s = best(lambda: target.copy_(source))
    print(f"copy             {8 * n / copy_s / 1e9:7.1f} GB/s read + written")
    wire, remainder = split(source)
    wire, remainder = (zeros(n, half.dtype).copy_(half) for half in (wire, remainder))  # in huge pages, as the store's
    m, v, gradient = zeros(n, torch.float32), zeros(n, torch.float32), torch.randn(n).bfloat16()
    step = AdamWStep(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, step=10, divisor=1.0)
    weight = Halves(wire, remainder, m, v, gradient, 0.1)
    halves = [zeros(n, half.dtype).fill_(1) for half in (wire, remainder)]
    moments = [zeros(n, torch.float32).fill_(1) for _ in range(2)]
    spare = Halves(halves[0], halves[1], moments[0], moments[1], gradient, 0.1)
    for threads in args.threads:
        ours_s = best(lambda t=threads: adamw([weight], step, threads=t))
        print(f"ours, {threads:3} threads {rate(n, ours_s, 26)}")
        spare_s = best(lambda t=threads: adamw([weight], step, to=[spare], threads=t))
        print(f"  into spare memory {rate(n, spare_s, 26)}, {spare_s / ours_s:.2f} x in place")
    fp32 = torch.randn(n)
    fused_s = best(lambda: fused(source, fp32, m, v))
    print(
        f"torch fused      {n / fused_s / 1e9:6.2f} Gparam/s, {28 * n / fused_s / 1e9:6.1f} GB/s (28 bytes/parameter)"
    )
    print(f"floor            {n / (26 * n / (8 * n / copy_s)) / 1e9:6.2f} Gparam/s at the copy's rate")


def rate(n: int, seconds: float, num_bytes: int) -> str:
    bandwidth = num_bytes * n / seconds / 1e9
    return f"{n / seconds / 1e9:6.2f} Gparam/s, {bandwidth:6.1f} GB/s ({num_bytes} bytes/parameter)"


def fused(weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [weight], [gradient], [m], [v], [], [torch.tensor(10.0)],
        lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def best(call, repeats: int = 7) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
