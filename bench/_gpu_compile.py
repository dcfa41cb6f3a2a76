"""Every Triton kernel compiled for a Hopper GPU, without one: registers, spills, shared memory, and what it is made of.

The kernels are started as the runner starts them, on tensors without memory, so the specialisations are the real ones.
"""

# pyright: reportMissingImports=false
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from _gpu_kernels import Bits
from triton.backends.compiler import GPUTarget

from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.serve.gpu.compute import Values, run_steps
from openwafer.serve.gpu.fast import TritonKernels
from openwafer.serve.gpu.places import Run, most_numbers, unpacked
from openwafer.serve.gpu.plan import make_plan
from openwafer.serve.gpu.runner import BLOCK_SIZE
from openwafer.serve.matrix import Matrix
from openwafer.serve.program import Program, Weights, build_program

TARGET = GPUTarget("cuda", 90, 32)
META = torch.device("meta")
_TOOLS = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One specialisation of a kernel; counts are of instructions in its machine code."""

    name: str
    about: str
    num_warps: int
    num_registers: int
    stack_bytes: int  # spilled registers and arrays in local memory
    shared_bytes: int
    num_wide_loads: int  # of 16 bytes: LDG.128 and asynchronous copies
    num_narrow_loads: int
    num_products: int  # on the tensor cores: HMMA
    num_group_products: int  # HGMMA

    @property
    def per_multiprocessor(self) -> int:
        """Programs that fit at once: 65,536 registers, 227 KiB of shared memory, 64 warps."""
        by_registers = 65536 // (self.num_warps * 32 * max(8, -(-self.num_registers // 8) * 8))
        by_shared = 227 * 1024 // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, 64 // self.num_warps, 32)


class _Driver:
    """Answers as Triton's driver would on such a GPU; launches nothing."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiling:
    """Stands for a kernel: being started means being compiled."""

    def __init__(self, kernel: Any, found: list[tuple[str, Any, dict[str, Any]]]) -> None:
        self._kernel = kernel
        self._found = found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*args: Any, **flags: Any) -> None:
            assert all(0 < side < limit for side, limit in zip(grid, (1 << 31, 65536, 65536), strict=False)), grid
            compiled = self._kernel.run(*args, grid=grid, warmup=True, **flags)
            self._found.append((self._kernel.__name__, compiled, flags | {"grid": grid}))

        return start


def meta_program(config: ModelConfig, num_bits: Bits | None = None) -> Program:
    """The shapes of a model, no weights; bf16, or packed to 4 or 8 bits."""
    with META:
        module = build(config)
        weights: Weights = {}
        for name, weight in module.named_parameters():
            if weight.dim() < 2:
                weights[name] = torch.empty(weight.shape)
            else:
                weights[name] = _meta_matrix(weight, num_bits)
    return build_program(config, weights)


def _meta_matrix(weight: torch.Tensor, num_bits: Bits | None) -> Matrix:
    if num_bits is not None:
        return Matrix.quantized(weight, num_bits)
    rows, columns = weight.shape
    return Matrix("bf16", rows, columns, torch.empty(-(-rows // 16), columns, 16, dtype=torch.bfloat16))


def places_of(counts: Sequence[int], num_blocks: int) -> Any:
    """Sequences with so many rows each, after 300 others."""
    firsts = np.cumsum([0, *counts]).tolist()
    runs = tuple(
        Run(first=first, count=count, start=0 if count > 1000 else 300, sequence=index)
        for index, (first, count) in enumerate(zip(firsts, counts, strict=False))
        if count > 8
    )
    num_singles = sum(count for count in counts if count <= 8)
    staged = torch.empty(most_numbers(sum(counts), num_blocks), dtype=torch.int32, device=META)
    return unpacked(staged, sum(counts), num_singles, runs)


def compile_all(
    config: ModelConfig, kernels: TritonKernels, batches: Sequence[Sequence[int]], num_bits: Bits | None = None
) -> list[Compiled]:
    """Those that batches with so many rows per sequence need; each specialisation once."""
    from triton.runtime import driver

    driver.set_active(_Driver())  # pyright: ignore[reportArgumentType]
    found: list[tuple[str, Any, dict[str, Any]]] = []
    for owner in (kernels, kernels.packed, kernels.splitting):
        for name, kernel in vars(owner).items():
            if isinstance(kernel, triton.JITFunction):
                setattr(owner, name, _Compiling(kernel, found))
    config = replace(config, num_hidden_layers=min(config.num_hidden_layers, 2))
    program = meta_program(config, num_bits)
    plan = make_plan(program, META, torch.bfloat16, 4096)
    cache = torch.empty(
        config.num_hidden_layers,
        2,
        64,
        config.kv_heads,
        BLOCK_SIZE,
        config.head_size,
        dtype=torch.bfloat16,
        device=META,
    )
    seen: dict[int, Compiled] = {}
    for counts in batches:
        values = Values(program.widths, torch.bfloat16)
        places = places_of(counts, 64)
        run_steps(plan.body, kernels, values, places, cache)
        run_steps(plan.head, kernels, values, places, cache)
        for name, compiled, flags in found:
            if id(compiled) not in seen:
                seen[id(compiled)] = _read(name, compiled, flags)
        found.clear()
    return list(seen.values())


def _read(name: str, compiled: Any, flags: dict[str, Any]) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _asked("cuobjdump", "--dump-resource-usage", str(cubin))
        code = _asked("cuobjdump", "--dump-sass", str(cubin))
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    if folder := os.environ.get("OPENWAFER_SASS"):
        Path(folder, f"{name}-{len(os.listdir(folder)):03}.sass").write_text(f"// {flags}\n{code}")
    kept = ("grid", "NUM_INPUTS", "BITS", "GATED", "HAS_NORM", "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCKS", "STAGES")
    kept += ("PARTS", "WINDOW")
    return Compiled(
        name=name,
        about=" ".join(f"{key.lower()} {_short(flags[key])}" for key in kept if key in flags),
        num_warps=compiled.metadata.num_warps,
        num_registers=numbers["REG"],
        stack_bytes=numbers["STACK"] + numbers["LOCAL"] + 4 * len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared_bytes=compiled.metadata.shared,
        num_wide_loads=len(re.findall(r"\bLDG\S*\.128|\bLDGSTS\S*\.128|\bUTMALDG", code)),
        num_narrow_loads=len(re.findall(r"\bLDG(?!STS|DEPBAR)(?!\S*\.128)", code)),
        num_products=len(re.findall(r"\bHMMA", code)),
        num_group_products=len(re.findall(r"\bHGMMA", code)),
    )


def _short(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _asked(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], check=True, capture_output=True, text=True).stdout


def table(rows: Sequence[Compiled]) -> str:
    heads = "kernel                  regs stack shared fit 128-bit other  HMMA HGMMA"
    lines = [
        f"{row.name:24}{row.num_registers:4} {row.stack_bytes:5} {row.shared_bytes:6} {row.per_multiprocessor:3} "
        f"{row.num_wide_loads:7} {row.num_narrow_loads:5} {row.num_products:5} {row.num_group_products:5}  {row.about}"
        for row in rows
    ]
    return "\n".join([heads, *lines])
