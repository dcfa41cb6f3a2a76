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


def run_gemm(config: GemmConfig, wafer: Wafer, setting: Setting) -> Outcome:
    return (summa if config.algorithm == "summa" else meshgemm).run(config, wafer, setting)


KERNELS = {
    "broadcast": Kernel("one vector to every PE of a grid", broadcast.BroadcastConfig, broadcast.run),
    "scatter": Kernel("pieces of one PE to the PEs of a row", scatter.ScatterConfig, scatter.run),
    "gather": Kernel("pieces of the PEs of a row into one", gather.GatherConfig, gather.run),
    "reduce": Kernel("sum of vectors along a row", reduce.ReduceConfig, reduce.run),
    "allreduce": Kernel("the same sum in every PE", allreduce.AllReduceConfig, allreduce.run),
    "gemv": Kernel("vector times stationary matrix", gemv.GemvConfig, gemv.run),
    "gemm": Kernel("matrix times matrix", GemmConfig, run_gemm),
    "axpy": Kernel("weight streaming, non-zero weights only", axpy.AxpyConfig, axpy.run),
    "spmm": Kernel("sparse matrix times dense matrix", spmm.SpmmConfig, spmm.run),
    "stencil": Kernel("3D 7-point stencil", stencil.StencilConfig, stencil.run),
    "decode": Kernel("one transformer decode layer", decode.DecodeConfig, decode.run),
    "softmax": Kernel("softmax of a distributed vector", rmsnorm.NormConfig, softmax.run),
    "rmsnorm": Kernel("RMSNorm of a distributed vector", rmsnorm.NormConfig, rmsnorm.run),
}
