"""The machines of a run, as the Python API names them. This module imports no torch."""

from dataclasses import dataclass
from typing import Literal

from openwafer.config import conform, option
from openwafer.errors import UserError
from openwafer.train.config import Precision


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The workers."""

    num_csx: int = option(1, help="number of workers", minimum=1)
    device: Literal["cpu", "cuda"] = option("cpu", help="where Units are computed")
    device_memory: int | None = option(None, help="cuda: the most memory of each GPU to use, in bytes", minimum=1)
    precision: Precision = option(None, help="fp32 or bf16 (default: bf16 on cuda, fp32 on cpu)")
    csx_threads: int | None = option(None, help="threads of each worker when there are several", minimum=1)

    def __post_init__(self) -> None:
        conform(self)
        if self.precision is None:
            object.__setattr__(self, "precision", "bf16" if self.device == "cuda" else "fp32")
        if self.device == "cpu" and self.device_memory is not None:
            raise UserError(f"device_memory {self.device_memory} is for device cuda: on the CPU give a memory budget")
