"""The parts of `decode_gpu.py` that need the engine: one user, many users, a long prompt, a profile."""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import _gpu_kernels
import numpy as np
import torch
from _journal import Journal

from openwafer.models.config import ModelConfig
from openwafer.serve.core import Event, Request, Sampling
from openwafer.serve.engine import EngineConfig, LocalEngine
from openwafer.serve.gpu.fast import TritonKernels
from openwafer.serve.gpu.interpreted import is_interpreted
from openwafer.serve.gpu.invariant import InvariantKernels
from openwafer.serve.gpu.packed_weight import device_bytes
from openwafer.serve.gpu.plain import Kernels
from openwafer.serve.gpu.runner import BLOCK_SIZE, SIZES, GpuRunner
from openwafer.serve.gpu.tuning import Tuning
from openwafer.serve.program import Linear
from openwafer.serve.runner import Batch, Draw

# Measured on the same kind of GPU with the same shape, and what we want to reach.
ONE_USER = "gpt-fast 57.5 %, target 75 %"
MANY_USERS = {
    32: "transformers continuous batching 332, target 5000 while decoding, 70 % of one user's speed",
    128: "transformers continuous batching 757, target 12000 while decoding and 9000 end to end",
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The engine that all parts share, and what they need to know of it."""

    config: ModelConfig
    device: torch.device
    args: argparse.Namespace
    runner: GpuRunner
    engine: LocalEngine
    weight_bytes: int  # that every token reads: all but the embedding
    token_bytes: int  # of cache for each token of context

    @classmethod
    def opened(
        cls,
        config: ModelConfig,
        device: torch.device,
        args: argparse.Namespace,
        tuning: Tuning,
        journal: Journal,
        num_bits: _gpu_kernels.Bits | None = None,
    ) -> "Bench":
        """`num_bits`: of packed weights."""
        began = time.perf_counter()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        program = _gpu_kernels.random_program(config, device, num_bits)
        users = max(args.users)
        is_fast = not args.plain and (device.type == "cuda" or is_interpreted())
        kernels: Kernels | None = TritonKernels(tuning) if is_fast else None
        if is_fast and args.invariant:
            kernels = InvariantKernels(config.max_position_embeddings, tuning)
        num_blocks = users * -(-(args.inputs + args.outputs) // BLOCK_SIZE) + 4 * -(-args.prompt // BLOCK_SIZE)
        runner = GpuRunner(
            program,
            num_blocks=num_blocks,
            max_rows=args.step_tokens,
            max_sequences=users,
            device=device,
            dtype=dtype,
            kernels=kernels,
            graph_sizes=(1, *args.users) if args.quick else SIZES,
        )
        engine = LocalEngine(
            runner,
            config,
            # Whatever is computed is meant to be: no prompt is found in the cache.
            EngineConfig(max_running=users, max_step_tokens=args.step_tokens, prefix_cache=False),
            max_context=min(config.max_position_embeddings, num_blocks * BLOCK_SIZE),
        )
        linears = [op for op in (*program.body, *program.head) if isinstance(op, Linear)]
        print(f"loaded and recorded in {time.perf_counter() - began:.1f} s", flush=True)
        journal.note(
            loaded_s=time.perf_counter() - began, overlaps=tuning.overlaps, is_fast=is_fast, invariant=args.invariant
        )
        return cls(
            config=config,
            device=device,
            args=args,
            runner=runner,
            engine=engine,
            weight_bytes=sum(device_bytes(op.matrix, dtype) for op in linears),
            token_bytes=2 * config.num_hidden_layers * config.kv_heads * config.head_size * dtype.itemsize,
        )


@dataclass(kw_only=True)
class Heard:
    """When the tokens of one request came."""

    times: list[float]
    counts: list[int]


def random_prompts(bench: Bench, num_users: int, num_inputs: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, bench.config.vocab_size, (num_users, num_inputs)).tolist()


def ask(bench: Bench, num_users: int, num_inputs: int, num_outputs: int, seed: int) -> tuple[float, list[Heard]]:
    """Requests of random tokens, all at once; when they were sent, and what each heard."""
    heard = [Heard(times=[], counts=[]) for _ in range(num_users)]
    done = threading.Semaphore(0)

    def listener(mine: Heard) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            mine.times.append(time.perf_counter())
            mine.counts.append(len(event.tokens))
            if event.finish_reason is not None:
                assert event.finish_reason == "length", event.error
                done.release()

        return on_event

    args = bench.args
    prompts = random_prompts(bench, num_users, num_inputs, seed)
    sampling = Sampling(max_tokens=num_outputs, temperature=args.temperature, top_p=args.top_p, seed=seed)
    began = time.perf_counter()
    for user, prompt_ in enumerate(prompts):
        request = Request(id=f"{seed}-{user}", prompt=tuple(prompt_), sampling=sampling)
        bench.engine.submit(request, listener(heard[user]))
    for _ in range(num_users):
        done.acquire()
    return began, heard


def decode_rate(heard: list[Heard]) -> float:
    """Tokens per second of all users, from when the last has its first token to when the first is done."""
    start = max(mine.times[0] for mine in heard)
    stop = min(mine.times[-1] for mine in heard)
    count = sum(n for mine in heard for at, n in zip(mine.times, mine.counts, strict=True) if start < at <= stop)
    return count / (stop - start) if stop > start else 0.0


def one_user(bench: Bench, journal: Journal) -> None:
    args = bench.args
    ask(bench, 1, args.inputs, args.outputs, seed=0)
    rate = max(
        decode_rate(ask(bench, 1, args.inputs, args.outputs, seed=1 + number)[1]) for number in range(args.rounds)
    )
    token_bytes = bench.weight_bytes + bench.token_bytes * (args.inputs + args.outputs // 2)
    bound = journal.numbers.get("copy_bytes_per_s", 4.3e12) / token_bytes
    alone_s = runner_alone(bench)
    print(
        f"1 user: {rate:.1f} tokens/s, {100 * rate / bound:.1f} % of the bound {bound:.1f} "
        f"({token_bytes / 1e9:.2f} GB a token); without the engine {1 / alone_s:.1f} tokens/s ({ONE_USER})",
        flush=True,
    )
    journal.note(
        one_user_tokens_per_s=rate,
        one_user_bound=bound,
        one_user_share=rate / bound,
        runner_alone_tokens_per_s=1 / alone_s,
        overlaps=not args.cautious,
    )


def runner_alone(bench: Bench) -> float:
    """Seconds of one decoding step of one user, without scheduler, events and threads."""
    times = []
    for _ in range(5 if bench.args.tiny else 50):
        began = time.perf_counter()
        step_alone(bench, 1)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def step_alone(bench: Bench, num_users: int) -> None:
    """One decoding step of so many users after their prompts, straight from the runner."""
    at = bench.args.inputs
    width = at // BLOCK_SIZE + 1
    batch = Batch(
        tokens=np.ones(num_users, np.int32),
        positions=np.full(num_users, at, np.int32),
        sequences=np.arange(num_users, dtype=np.int32),
        tables=np.arange(num_users * width, dtype=np.int32).reshape(num_users, width),
        logit_rows=np.arange(num_users, dtype=np.int32),
    )
    greedy = Draw(temperature=0.0, top_k=None, top_p=1.0, min_p=0.0, uniform=0.0)
    bench.runner.run_and_draw(batch, [greedy] * num_users)


def profile(bench: Bench, journal: Journal) -> None:
    """Where the time of a decoding step goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    on_gpu = bench.device.type == "cuda"
    for users in (1, *bench.args.users):
        step_alone(bench, users)
        with profiled(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
            step_alone(bench, users)
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        print(f"{users} users\n{found.key_averages().table(sort_by=order, row_limit=14, max_name_column_width=70)}")


def many_users(bench: Bench, journal: Journal) -> None:
    args = bench.args
    for users in args.users:
        ask(bench, users, args.inputs, 4, seed=100)
        rates, totals = [], []
        for number in range(args.rounds):
            began, heard = ask(bench, users, args.inputs, args.outputs, seed=101 + number)
            rates.append(decode_rate(heard))
            totals.append(users * args.outputs / (max(mine.times[-1] for mine in heard) - began))
        journal.note(
            **{f"users_{users}_decode_tokens_per_s": max(rates), f"users_{users}_total_tokens_per_s": max(totals)}
        )
        line = f"{users} users: decoding {max(rates):.0f} tokens/s, end to end {max(totals):.0f} tokens/s"
        if one := journal.numbers.get("one_user_tokens_per_s"):
            share = max(rates) / users / one
            journal.note(**{f"users_{users}_share_of_one": share})
            line += f", each {100 * share:.0f} % of one user's speed"
        print(f"{line} ({MANY_USERS.get(users, 'no target')})", flush=True)


def prompt(bench: Bench, journal: Journal) -> None:
    args = bench.args
    ask(bench, 1, args.prompt, 1, seed=200)
    times = []
    for number in range(args.rounds):
        began, heard = ask(bench, 1, args.prompt, 1, seed=201 + number)
        times.append(heard[0].times[0] - began)
    floor_s = _gpu_kernels.matmul_floor(bench.config, bench.device, args.prompt)
    print(
        f"prompt of {args.prompt}: first token after {1e3 * min(times):.1f} ms, {min(times) / floor_s:.2f} times the "
        f"{1e3 * floor_s:.1f} ms of its matrix products (target 1.3)",
        flush=True,
    )
    journal.note(first_token_s=min(times), matmul_floor_s=floor_s, first_token_over_floor=min(times) / floor_s)


RUNS: dict[str, Callable[[Bench, Journal], None]] = {
    "one": one_user,
    "users": many_users,
    "prompt": prompt,
    "profile": profile,
}


def copy_bandwidth(device: torch.device, tiny: bool, journal: Journal) -> None:
    """Bytes read and written per second by a copy on the device, of arrays far larger than its caches."""
    count = (16 << 20) if tiny else (4 << 30)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2 * count / _gpu_kernels.seconds(lambda: target.copy_(source), device)
    print(f"copy bandwidth {rate / 1e12:.3f} TB/s, read and written", flush=True)
    journal.note(copy_bytes_per_s=rate)
