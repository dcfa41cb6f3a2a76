"""The kernels of `decode_gpu.py` one by one: whether they are right, how fast each is, and the floor of a prompt."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from _journal import Journal

from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.serve.gpu.compute import Values, run_steps
from openwafer.serve.gpu.fast import TritonKernels
from openwafer.serve.gpu.places import most_numbers, packed, runs_of, unpacked
from openwafer.serve.gpu.plain import Kernels, PlainKernels
from openwafer.serve.gpu.plan import Attention, Project, make_plan
from openwafer.serve.gpu.runner import BLOCK_SIZE, GpuRunner
from openwafer.serve.gpu.tuning import Tuning
from openwafer.serve.matrix import Matrix
from openwafer.serve.program import Program, Weights, build_program
from openwafer.serve.runner import Batch

Bits = Literal[4, 8]  # of packed weights
PACKED: tuple[Bits, ...] = (4, 8)


def random_program(config: ModelConfig, device: torch.device, num_bits: Bits | None = None) -> Program:
    """Random weights made on the device; bf16 there, fp32 on a CPU, or packed to 4 or 8 bits."""
    with torch.device("meta"):
        module = build(config)
    generator = torch.Generator(device).manual_seed(0)
    dtype, form = (torch.bfloat16, "bf16") if device.type == "cuda" else (torch.float32, "fp32")
    weights: Weights = {}
    for name, weight in module.named_parameters():
        if weight.dim() < 2:
            weights[name] = torch.ones(weight.shape)
        else:
            # As wide as the inputs allow without growing: logits far enough apart to be told from rounding.
            values = torch.randn(weight.shape, generator=generator, device=device, dtype=dtype)
            values.mul_(weight.shape[1] ** -0.5)
            is_packed = num_bits is not None
            weights[name] = Matrix.quantized(values, num_bits) if is_packed else Matrix.from_floats(values, form)
    return build_program(config, weights)


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    """The median time of `work`, after two that are not counted."""
    times = []
    for number in range(rounds + 2):
        elapsed = _device_seconds(work) if device.type == "cuda" else _host_seconds(work)
        if number >= 2:
            times.append(elapsed)
    return statistics.median(times)


def _device_seconds(work: Callable[[], object]) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3


def _host_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def matmul_floor(config: ModelConfig, device: torch.device, num_rows: int) -> float:
    """Seconds of all matrix products of a prompt and of nothing else; the head computes one row."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width, inner = config.hidden_size, config.feed_forward_size
    q, kv = config.num_heads * config.head_size, config.kv_heads * config.head_size
    pairs = []
    for inputs, outputs in ((width, q + 2 * kv), (q, width), (width, 2 * inner), (inner, width)):
        rows = torch.randn(num_rows, inputs, device=device, dtype=dtype)
        pairs.append((rows, torch.randn(outputs, inputs, device=device, dtype=dtype)))
    head = (
        torch.randn(1, width, device=device, dtype=dtype),
        torch.randn(config.vocab_size, width, device=device, dtype=dtype),
    )

    def products() -> None:
        for _ in range(config.num_hidden_layers):
            for rows, weight in pairs:
                torch.nn.functional.linear(rows, weight)
        torch.nn.functional.linear(*head)

    return seconds(products, device)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch with the rows of one kind, and a name for it."""

    name: str
    counts: list[int]  # rows of each sequence
    starts: list[int]  # their first positions


CASES = (
    Case(name="1 user", counts=[1], starts=[300]),
    Case(name="5 users", counts=[1] * 5, starts=[0, 15, 16, 100, 333]),
    Case(name="64 users", counts=[1] * 64, starts=list(range(64))),
    Case(name="guesses", counts=[4, 1, 4], starts=[20, 7, 100]),
    Case(name="pieces of prompts", counts=[65, 1, 30, 100], starts=[0, 50, 33, 200]),
    Case(name="a whole prompt", counts=[1100], starts=[0]),
    Case(name="192 rows, ragged", counts=[1] * 192, starts=[(37 * row) % 700 for row in range(192)]),
)


def check(
    config: ModelConfig,
    device: torch.device,
    journal: Journal,
    cases: Sequence[Case] = CASES,
    num_tokens: int = 32,
    tuning: Tuning | None = None,
) -> float:
    """Prints the error of each fast step beside its plain one, relative to the size of the result; the worst of all."""
    config = replace(config, num_hidden_layers=min(2, config.num_hidden_layers))
    program = random_program(config, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plan = make_plan(program, device, dtype, config.max_position_embeddings)
    fast, plain = TritonKernels(tuning), PlainKernels()
    worst: list[float] = []

    def compare(case: Case) -> None:
        errors: dict[str, float] = {}
        try:
            with torch.inference_mode():
                for name, found in compare_steps(plan.body, case, config, fast, plain, device, dtype):
                    errors[name] = found
        finally:  # what was found before a kernel failed
            print(f"{case.name:20}" + "  ".join(f"{name} {found:.1e}" for name, found in errors.items()), flush=True)
            journal.note(**{f"error of {name}, {case.name}": found for name, found in errors.items()})
        worst.append(max(errors.values()))

    for case in cases:
        longest = max(start + count for start, count in zip(case.starts, case.counts, strict=True))
        if longest <= config.max_position_embeddings:
            journal.part(f"check {case.name}", lambda case=case: compare(case))
    verdict = "right" if len(worst) and max(worst) < 0.02 and not journal.failed else "WRONG"
    print(f"worst {max(worst, default=float('inf')):.1e}: {verdict} (bf16 rounds at 4e-3)", flush=True)
    journal.note(worst_error=max(worst, default=float("inf")), kernels=verdict)
    if num_tokens:
        journal.part("check answers", lambda: compare_answers(program, device, dtype, num_tokens, journal, tuning))
    return max(worst, default=float("inf"))


def compare_steps(
    steps: tuple,
    case: Case,
    config: ModelConfig,
    fast: Kernels,
    plain: Kernels,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, float]]:
    """Each step of the first layer computed by both from the same inputs."""
    batch, num_blocks = batch_of(case, config)
    runs = runs_of(batch)
    singles = np.concatenate(
        [np.arange(run.first, run.first + run.count) for run in runs if run.count <= 8] or [np.empty(0)]
    )
    staged = np.zeros(most_numbers(len(batch.tokens), batch.tables.size), np.int32)
    count, _ = packed(batch, BLOCK_SIZE, len(batch.tokens), 0, singles.astype(np.int32), staged)
    places = unpacked(
        torch.from_numpy(staged).to(device), len(batch.tokens), count, tuple(run for run in runs if run.count > 8)
    )
    generator = torch.Generator(device).manual_seed(1)
    shape = (config.num_hidden_layers, 2, num_blocks, config.kv_heads, BLOCK_SIZE, config.head_size)
    cache = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    values = Values({"x": config.hidden_size, "qkv": 0, "attended": 0, "inner": 0, "h": 0}, dtype)
    run_steps(steps[:1], plain, values, places, cache)
    stream = values.read(steps[0].dst)
    names = iter(("qkv", "attend", "out", "gate_up", "down"))
    inputs: dict[str, torch.Tensor] = {"x": stream}
    for step in steps[1:6]:
        if isinstance(step, Attention):
            other = inputs["qkv"].clone(), cache.clone()
            for kernels, qkv, held in ((plain, inputs["qkv"], cache), (fast, *other)):
                kernels.rotate_and_store(step, qkv, places, *held[step.attend.layer])
            yield "rotate", error(other[0], inputs["qkv"])
            yield "store", error(other[1], cache)
            arguments = step, inputs["qkv"], places, *cache[step.attend.layer]
            inputs["attended"] = plain.attend(*arguments)
            yield next(names), error(fast.attend(*arguments), inputs["attended"])
        elif isinstance(step, Project) and step.adds:
            mine, source = stream.clone(), inputs[step.src.buffer]
            fast.project_into(step, source, mine)
            plain.project_into(step, source, stream)
            yield next(names), error(mine, stream)
        elif isinstance(step, Project):
            found = plain.project(step, inputs[step.src.buffer], wide=False)
            yield next(names), error(fast.project(step, inputs[step.src.buffer], wide=False), found)
            inputs[step.dst.buffer] = found


def batch_of(case: Case, config: ModelConfig) -> tuple[Batch, int]:
    """Random tokens; blocks in any order."""
    rng = np.random.default_rng(0)
    counts, starts = case.counts, case.starts
    width = max(-(-(start + count) // BLOCK_SIZE) for start, count in zip(starts, counts, strict=True))
    num_blocks = width * len(counts)
    batch = Batch(
        tokens=rng.integers(0, config.vocab_size, sum(counts)).astype(np.int32),
        positions=np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).astype(np.int32),
        sequences=np.repeat(np.arange(len(counts)), counts).astype(np.int32),
        tables=rng.permutation(num_blocks).reshape(len(counts), width).astype(np.int32),
        logit_rows=np.array([0], np.int32),
    )
    return batch, num_blocks


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole, relative; not a number counts as infinite."""
    value = float((found.float() - expected.float()).norm() / expected.float().norm())
    return value if value == value else float("inf")


def compare_answers(
    program: Program,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    journal: Journal,
    tuning: Tuning | None = None,
) -> None:
    """Greedy tokens of four users, fast and plain, and the logits of both after the plain path's tokens."""
    config = program.config
    paths = []
    for kernels in (TritonKernels(tuning), PlainKernels()):
        paths.append(
            GpuRunner(
                program,
                num_blocks=64,
                max_rows=256,
                max_sequences=4,
                device=device,
                dtype=dtype,
                kernels=kernels,
            )
        )
    fast, plain = paths
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (4, 20)).astype(np.int32)
    tables = np.arange(64, dtype=np.int32).reshape(4, 16)
    equal, errors, tokens, at = 0, [], prompts, np.arange(20)
    for _ in range(num_tokens):
        batch = Batch(
            tokens=tokens.reshape(-1).copy(),
            positions=np.tile(at, 4).astype(np.int32),
            sequences=np.repeat(np.arange(4), len(at)).astype(np.int32),
            tables=tables,
            logit_rows=(np.arange(4) * len(at) + len(at) - 1).astype(np.int32),
        )
        mine, other = fast.run(batch).copy(), plain.run(batch).copy()
        errors.append(float(np.linalg.norm(mine - other) / np.linalg.norm(other)))
        equal += int((mine.argmax(1) == other.argmax(1)).sum())
        tokens, at = other.argmax(1)[:, None].astype(np.int32), at[-1:] + 1
    print(f"greedy tokens: {equal} of {4 * num_tokens} equal; logits differ by {max(errors):.1e} at most", flush=True)
    journal.note(equal_tokens=equal, compared_tokens=4 * num_tokens, logit_error=max(errors))
