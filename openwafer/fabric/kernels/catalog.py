"""The kernels by name, with what the command line needs to know of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openwafer.fabric.kernels import (
    allreduce,
    axpy,
    broadcast,
    decode,
    gather,
    gemv,
    meshgemm,
    reduce,
    rmsnorm,
    scatter,
    softmax,
    spmm,
    stencil,
    summa,
)
from openwafer.fabric.kernels.matrices import GemmConfig
from openwafer.fabric.kernels.outcome import Outcome, Setting
from openwafer.systems import Wafer


@dataclass(frozen=True)
class Kernel:
    summary: str
    config: type
    run: Callable[[Any, Wafer, Setting], Outcome]
    shape: tuple[str, ...]  # options that say how many PEs there are
    load: tuple[str, ...]  # options that fill a PE's memory
    spread: tuple[str, ...] = ()  # options that leave less to each PE as they grow


def run_gemm(config: GemmConfig, wafer: Wafer, setting: Setting) -> Outcome:
    return (summa if config.algorithm == "summa" else meshgemm).run(config, wafer, setting)


_GRID, _ROW, _BOX = ("grid",), ("num_pes",), ("width", "height")

KERNELS = {
    "broadcast": Kernel("one vector to every PE of a grid", broadcast.BroadcastConfig, broadcast.run, _BOX, ("words",)),
    "scatter": Kernel(
        "pieces of one PE to the PEs of a row", scatter.ScatterConfig, scatter.run, _ROW, ("words", "num_pes")
    ),
    "gather": Kernel(
        "pieces of the PEs of a row into one", gather.GatherConfig, gather.run, _ROW, ("words", "num_pes")
    ),
    "reduce": Kernel("sum of vectors along a row", reduce.ReduceConfig, reduce.run, _ROW, ("words",)),
    "allreduce": Kernel("the same sum in every PE", allreduce.AllReduceConfig, allreduce.run, _ROW, ("words",)),
    "gemv": Kernel("vector times stationary matrix", gemv.GemvConfig, gemv.run, _GRID, ("size",), _GRID),
    "gemm": Kernel("matrix times matrix", GemmConfig, run_gemm, _GRID, ("size",), _GRID),
    "axpy": Kernel(
        "weight streaming, non-zero weights only", axpy.AxpyConfig, axpy.run, _ROW, ("tokens", "inputs", "outputs")
    ),
    "spmm": Kernel(
        "sparse matrix times dense matrix", spmm.SpmmConfig, spmm.run, _BOX, ("size", "columns", "density"), _BOX
    ),
    "stencil": Kernel("3D 7-point stencil", stencil.StencilConfig, stencil.run, _BOX, ("depth",)),
    "decode": Kernel(
        "one transformer decode layer",
        decode.DecodeConfig,
        decode.run,
        _GRID,
        ("width", "feed_forward", "context"),
        _GRID,
    ),
    "softmax": Kernel("softmax of a distributed vector", rmsnorm.NormConfig, softmax.run, _ROW, ("size",)),
    "rmsnorm": Kernel("RMSNorm of a distributed vector", rmsnorm.NormConfig, rmsnorm.run, _ROW, ("size",)),
}
