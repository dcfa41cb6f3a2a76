"""The machines of a run, as the Python API names them. This module imports no torch."""

from dataclasses import dataclass
from typing import Literal

from openwafer.config import option
from openwafer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The workers."""

    num_csx: int = option(1, help="number of workers", minimum=1)
    device: Literal["cpu", "cuda"] = option("cpu", help="where Units are computed")
    recompute: bool = option(True, help="compute what is inside a Unit again in backward; false: keep it")
    compile: bool = option(False, help="compile each distinct Unit function with torch.compile")

    def __post_init__(self) -> None:
        if self.num_csx != 1:
            raise UserError(f"num_csx {self.num_csx}: more than one worker does not work yet; use num_csx 1")
        if self.device != "cpu":
            raise UserError(f"device {self.device}: training on a GPU does not work yet; use device cpu")
