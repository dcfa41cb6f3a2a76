"""Tiles that the fast kernels could work in, tried one after another for as long as there is time."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from _gpu_kernels import PACKED, random_program, seconds
from _gpu_places import decode_places
from _journal import Journal

from openwafer.models.config import ModelConfig
from openwafer.serve.gpu.fast import TritonKernels
from openwafer.serve.gpu.packed_weight import PackedWeight, Weight
from openwafer.serve.gpu.plain import Kernels, PlainKernels
from openwafer.serve.gpu.plan import Attention, Plan, Project, make_plan
from openwafer.serve.gpu.tuning import Tile, Tuning

# outputs, inputs, warps, stages; the promising ones first, because the time may be over.
GEMV = (
    *((32, 256, 4, 4), (16, 512, 4, 4), (32, 256, 4, 3), (16, 512, 4, 3), (64, 128, 4, 4), (32, 512, 8, 3)),
    *((8, 1024, 4, 3), (16, 256, 4, 4), (8, 1024, 4, 1), (32, 256, 8, 4), (16, 1024, 8, 3), (4, 1024, 4, 1)),
)
# Inputs say something only for 8 bits and one row: other packed weights come in groups. Last, programs at least.
PACKED_GEMV = (
    *((32, 256, 4, 4, 250), (32, 512, 4, 3, 250), (16, 256, 4, 4, 250), (64, 256, 4, 3, 250), (32, 256, 8, 3, 250)),
    *((32, 256, 4, 3, 250), (32, 512, 4, 4, 250), (16, 256, 4, 5, 250), (32, 256, 4, 6, 250), (64, 256, 8, 2, 120)),
)
PACKED_SKINNY = (
    *((128, 256, 4, 3, 250), (128, 256, 8, 3, 250), (64, 256, 4, 3, 500), (64, 256, 4, 3, 250), (64, 256, 4, 2, 250)),
    *((64, 256, 4, 3, 120), (128, 256, 8, 3, 120), (64, 256, 4, 4, 250), (128, 256, 8, 2, 250), (128, 256, 4, 2, 250)),
)
SKINNY = (
    *((32, 128, 4, 4), (64, 128, 4, 4), (32, 256, 4, 4), (64, 64, 4, 6), (16, 256, 4, 4), (64, 128, 8, 4)),
    *((32, 128, 4, 6), (128, 64, 4, 5)),
)
WEIGHTS = {"bf16": None, **{f"int{num_bits}": num_bits for num_bits in PACKED}}
NAMES = ("qkv", "out", "gate_up", "down", "head")


def tune(
    config: ModelConfig, device: torch.device, journal: Journal, budget_s: float, only: Sequence[str] | None = None
) -> None:
    """Prints each candidate's bandwidth as it is found, and the best of each kind at the end.

    `only` names the weights whose products are looked at: bf16, int4, int8.
    """
    stop_at = time.monotonic() + budget_s
    one_layer = replace(config, num_hidden_layers=1)
    plans = {
        name: make_plan(random_program(one_layer, device, num_bits), device, _dtype(device), 4096)
        for name, num_bits in WEIGHTS.items()
        if only is None or name in only
    }
    found: dict[tuple[str, str], float] = {}
    with torch.inference_mode():
        for name, candidate, measured in _in_turn(_trials(config, plans, device)):
            if time.monotonic() > stop_at:
                print(f"tune: {budget_s} s are over", flush=True)
                break
            try:
                rate = measured()
            except Exception as error:  # noqa: BLE001
                print(f"{name:24} {candidate}: {type(error).__name__}: {str(error)[:160]}", flush=True)
                continue
            found[name, candidate] = rate
            print(f"{name:24} {rate / 1e12:6.3f} TB/s  {candidate}", flush=True)
            journal.note(**{f"tune {name} | {candidate}": rate})
    for name in dict.fromkeys(name for name, _ in found):
        ranked = sorted(((rate, what) for (of, what), rate in found.items() if of == name), reverse=True)
        print(f"best {name:24}" + "; ".join(f"{what} {rate / 1e12:.3f}" for rate, what in ranked[:3]), flush=True)


Trial = tuple[str, str, Callable[[], float]]


def _in_turn(groups: Sequence[Iterator[Trial]]) -> Iterator[Trial]:
    """A few of each group, then a few more: all are looked at even if the time is short."""
    left = list(groups)
    while left:
        for group in list(left):
            some = list(islice(group, 5))
            if not some:
                left.remove(group)
            yield from some


def _trials(config: ModelConfig, plans: dict[str, Plan], device: torch.device) -> list[Iterator[Trial]]:
    groups = []
    for name, plan in plans.items():
        steps = _named(plan, "" if name == "bf16" else f"{name} ")
        if name != "bf16":
            groups += [_products(steps, 1, PACKED_GEMV, device), _products(steps, 32, PACKED_SKINNY, device)]
            continue
        attention = next(step for step in plan.body if isinstance(step, Attention))
        groups += [
            _products(steps, 1, GEMV, device),
            _products(steps, 32, SKINNY, device),
            _decoding(config, attention, device),
            _products(steps, 8, SKINNY[:4], device),
            _products(steps, 128, (), device),
        ]
    return groups


def _named(plan: Plan, kind: str) -> dict[str, Project]:
    steps = [step for step in (*plan.body, *plan.head) if isinstance(step, Project)]
    return {kind + name: step for name, step in zip(NAMES, steps, strict=True)}


def _products(
    steps: dict[str, Project], num_rows: int, tiles: Sequence[tuple], device: torch.device
) -> Iterator[Trial]:
    """The library first, with packed weights unpacked for it; then tile by tile, on all layers of a kind."""
    is_packed = any(isinstance(step.weight, PackedWeight) for step in steps.values())
    library = TritonKernels(Tuning(packed_rows=0)) if is_packed else PlainKernels()
    candidates: list[tuple[str, Kernels]] = [("library", library)]
    for outputs, inputs, warps, stages, *programs in tiles:
        tile = Tile(num_outputs=outputs, num_inputs=inputs, num_warps=warps, num_stages=stages)
        tuning = Tuning(gemv=tile, skinny=tile, skinny_rows=64, packed_gemv=tile, packed_skinny=tile)
        tuning = replace(tuning, byte_gemv=tile, byte_skinny=tile)
        shown = f"{outputs}x{inputs} warps {warps} stages {stages}"
        if programs:
            tuning, shown = replace(tuning, num_programs=programs[0]), f"{shown} programs {programs[0]}"
        candidates.append((shown, TritonKernels(tuning)))
    for shown, kernels in candidates:
        for name, step in steps.items():
            src = torch.randn(num_rows, step.weight.shape[1], device=device).to(_dtype(device))
            yield (
                f"{name} of {num_rows} rows",
                shown,
                lambda step=step, src=src, kernels=kernels: product_rate(step, src, kernels, device),
            )


def product_rate(step: Project, src: torch.Tensor, kernels: Kernels, device: torch.device) -> float:
    """Bytes of weights per second, over copies of the weight that no cache holds."""
    size = step.weight.nbytes
    room = 1 << 30 if device.type == "cuda" else 1
    steps = [replace(step, weight=_copied(step.weight)) for _ in range(min(24, max(2, room // size)))]

    def work() -> None:
        for each in steps:
            kernels.project(each, src, wide=False)

    return len(steps) * size / repeated(work, device)


def _copied(weight: Weight) -> Weight:
    if isinstance(weight, torch.Tensor):
        return weight.clone()
    return replace(weight, quants=weight.quants.clone(), gains=weight.gains.clone())


def _decoding(config: ModelConfig, step: Attention, device: torch.device) -> Iterator[Trial]:
    """Attention of decoded rows: bytes of keys and values per second, after 320 tokens each."""
    length = 320 if device.type == "cuda" else 40
    for num_tokens, num_programs in ((32, 250), (64, 250), (16, 250), (32, 500), (64, 500), (128, 250), (32, 120)):
        kernels = TritonKernels(Tuning(decode_tokens=num_tokens, num_programs=num_programs))
        for users in (1, 32, 128) if device.type == "cuda" else (1, 2):
            yield (
                f"attention of {users} users",
                f"{num_tokens} tokens, {num_programs} programs",
                lambda users=users, kernels=kernels: _decoding_rate(config, step, kernels, users, length, device),
            )


def _decoding_rate(
    config: ModelConfig, step: Attention, kernels: TritonKernels, users: int, length: int, device: torch.device
) -> float:
    places, num_blocks = decode_places(users, length, device)
    heads, size = config.kv_heads, config.head_size
    num_layers = 4 if users > 8 else 32
    cache = torch.randn(num_layers, 2, num_blocks, heads, 16, size, device=device).to(_dtype(device))
    qkv = torch.randn(users, (config.num_heads + 2 * heads) * size, device=device).to(_dtype(device))
    out = torch.empty(users, config.num_heads * size, device=device, dtype=qkv.dtype)

    def work() -> None:
        for keys, values in cache:
            kernels.attend_singles(step, qkv, places, keys, values, out)

    num_bytes = num_layers * 2 * users * length * heads * size * qkv.element_size()
    return num_bytes / repeated(work, device)


def repeated(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of `work`, recorded as a graph where there are graphs."""
    work()
    if device.type != "cuda":
        return seconds(work, device, rounds=1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return seconds(graph.replay, device)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
