"""The part of `decode_gpu.py` in which half of the layers are not on the GPU: each step copies them from host memory.

The floor of a step is the time that those bytes take to be copied with nothing else going on, so one user cannot have
more tokens per second than one over it, and many users share it.
"""

import argparse
import dataclasses
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import _gpu_kernels
import numpy as np
import torch
from _gpu_engine import Bench, ask, decode_rate
from _journal import Journal

from openwafer.csx.device import Moment
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel
from openwafer.models.weights import everything
from openwafer.serve.budget import spread
from openwafer.serve.engine import EngineConfig, LocalEngine
from openwafer.serve.gpu.device import Device
from openwafer.serve.gpu.device_plan import device_dtype, plan_devices
from openwafer.serve.gpu.fast import TritonKernels
from openwafer.serve.gpu.gpus import Gpus
from openwafer.serve.gpu.interpreted import is_interpreted
from openwafer.serve.gpu.opening import open_on_gpu
from openwafer.serve.gpu.plain import Kernels, PlainKernels
from openwafer.serve.gpu.plan_builder import PlanBuilder
from openwafer.serve.gpu.runner import BLOCK_SIZE, GpuRunner
from openwafer.serve.gpu.tuning import Tuning
from openwafer.serve.loading import load_program
from openwafer.serve.program import Program
from openwafer.serve.region import Region
from openwafer.serve.runner import Batch

NUM_USERS = 32


def streamed(
    config: ModelConfig, device: torch.device, args: argparse.Namespace, tuning: Tuning, journal: Journal
) -> None:
    users, outputs = (2, 6) if args.tiny else (NUM_USERS, 16)
    began = time.perf_counter()
    gpus = BenchGpus(device, None if args.plain else tuning)
    stored = random_model(config, device)
    bench = opened(stored, device, args, gpus, users, outputs)
    num_bytes = bench.runner.num_streamed_bytes
    rate = copy_rate(gpus.opened, 1 << 20 if args.tiny else 1 << 30)
    floor_s = num_bytes / rate
    print(
        f"loaded in {time.perf_counter() - began:.1f} s; each step copies {num_bytes / 1e9:.2f} GB, which alone takes "
        f"{1e3 * floor_s:.1f} ms ({rate / 1e9:.1f} GB/s)",
        flush=True,
    )
    journal.note(streamed_bytes=num_bytes, host_to_device_bytes_per_s=rate, streamed_floor_s=floor_s)
    for count in (1, users):
        ask(bench, count, args.inputs, 3, seed=300)
        found = max(
            decode_rate(ask(bench, count, args.inputs, outputs, seed=301 + number)[1]) for number in range(args.rounds)
        )
        share = found * floor_s / count
        print(
            f"{count} users, half of the layers streamed: {found:.1f} tokens/s, {100 * share:.1f} % of the bound "
            f"{count / floor_s:.1f}",
            flush=True,
        )
        journal.note(**{f"streamed_{count}_tokens_per_s": found, f"streamed_{count}_share_of_bound": share})
    is_equal = logits_of(bench.runner, config) == logits_of(resident(stored, gpus), config)
    print(f"logits are {'those' if is_equal else 'NOT THOSE'} of the model with all layers on the device", flush=True)
    journal.note(streamed_equal=is_equal)
    bench.engine.close()
    if not is_equal:
        raise RuntimeError("streamed layers give other bits")


def logits_of(runner: GpuRunner, config: ModelConfig) -> bytes:
    """Of a prompt and of the steps after it, no other step being under way."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 40).astype(np.int32)
    found, start = b"", 0
    for count in (32, 1, 1, 1):
        batch = Batch(
            tokens=tokens[start : start + count],
            positions=np.arange(start, start + count, dtype=np.int32),
            sequences=np.zeros(count, np.int32),
            tables=np.arange(3, dtype=np.int32)[None],
            logit_rows=np.array([count - 1], np.int32),
        )
        found += runner.run(batch).tobytes()
        start += count
    return found


def resident(stored: StoredModel, gpus: "BenchGpus") -> GpuRunner:
    """The same model with all layers on the device, and without graphs as well."""
    config, device = stored.config, gpus.opened
    chosen = gpus.chosen
    builder = PlanBuilder(device, device_dtype(chosen), 64, frozenset())
    program = load_program(stored, chosen, taker=builder)
    return GpuRunner(
        program,
        num_blocks=4,
        max_rows=32,
        max_sequences=1,
        device=device.where,
        dtype=device_dtype(chosen),
        kernels=gpus.kernels(program, chosen, device),
        graph_sizes=(),
        plan=builder.plan(Region.whole(config)),
    )


def opened(
    stored: StoredModel, device: torch.device, args: argparse.Namespace, gpus: "BenchGpus", users: int, outputs: int
) -> Bench:
    """The engine as the server opens it, but for the layers: every second one is streamed, though all would fit."""
    config = stored.config
    num_blocks = users * -(-(args.inputs + outputs) // BLOCK_SIZE) + 1
    gpus.chosen = chosen = EngineConfig(
        device="cuda",
        dtype="auto" if device.type == "cuda" else "fp32",
        max_running=users,
        max_step_tokens=args.step_tokens,
        prefix_cache=False,
    )
    (plan,) = plan_devices(stored, chosen, gpus)
    layers = sorted(spread(plan.region.layers, config.num_hidden_layers // 2))
    plan = dataclasses.replace(plan, num_blocks=num_blocks, streamed_layers=tuple(layers))
    runner = open_on_gpu(stored, chosen, plan, gpus)
    context = min(config.max_position_embeddings, num_blocks * BLOCK_SIZE)
    engine = LocalEngine(runner, config, chosen, max_context=context)
    return Bench(config=config, device=device, args=args, runner=runner, engine=engine, weight_bytes=0, token_bytes=0)


def random_model(config: ModelConfig, device: torch.device) -> StoredModel:
    """A model whose weights are made on the device when they are asked for."""
    with torch.device("meta"):
        module = build(config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def tensors(wanted=everything) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in module.named_parameters():
            if wanted(name) and weight.dim() < 2:
                yield name, torch.ones(weight.shape)
            elif wanted(name):
                generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))  # in whatever order
                values = torch.randn(weight.shape, generator=generator, device=device, dtype=dtype)
                yield name, values.mul_(weight.shape[1] ** -0.5)

    kind = "BF16" if device.type == "cuda" else "F32"
    return StoredModel(
        path=Path("random"),
        config=config,
        tensors=tensors,
        kinds=lambda: {name: kind for name, _ in module.named_parameters()},
        tokenizer=lambda: None,
    )


def copy_rate(device: Device, num_bytes: int) -> float:
    """Bytes per second from page-locked memory to the device, nothing else going on."""
    host = device.host_memory(num_bytes, torch.uint8)
    there = device.empty(num_bytes, torch.uint8)
    return num_bytes / _gpu_kernels.seconds(lambda: there.copy_(host, non_blocking=True), device.where, rounds=5)


class BenchGpus(Gpus):
    """The first GPU with tiles of our choice, or the CPU in its place."""

    opened: Device  # by `open`
    chosen: EngineConfig

    def __init__(self, device: torch.device, tuning: Tuning | None) -> None:
        self._device = device
        self._tuning = tuning

    def count(self) -> int:
        return super().count() if self._device.type == "cuda" else 1

    def memory(self, index: int) -> tuple[int, int]:
        return super().memory(index) if self._device.type == "cuda" else (1 << 30, 1 << 30)

    def open(self, index: int) -> Device:
        self.opened = super().open(index) if self._device.type == "cuda" else HostDevice()
        return self.opened

    def kernels(self, program: Program, config: EngineConfig, device: Device) -> Kernels:
        is_fast = self._tuning is not None and (self._device.type == "cuda" or is_interpreted())
        return TritonKernels(self._tuning) if is_fast else PlainKernels()


class HostMoment:
    def synchronize(self) -> None: ...


class HostDevice:
    """Host memory, in which everything is done at once: shows that this script works."""

    where = torch.device("cpu")

    def allow(self, num_bytes: int) -> None: ...

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype)

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype)

    def now(self) -> HostMoment:
        return HostMoment()

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Moment) -> HostMoment:
        target.copy_(source)
        return HostMoment()

    def use(self, moment: Moment) -> None: ...
