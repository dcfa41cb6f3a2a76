"""What MemoryX does with weights: the optimizer, and the memory it may use. This module imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openwafer.config import option
from openwafer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights are updated. Weights with fewer than two dimensions (norms, biases) are not decayed."""

    kind: Literal["adamw"] = option("adamw", help="optimizer")
    lr: float = option(3e-4, help="base learning rate", minimum=0)
    beta1: float = option(0.9, help="decay of the first moment", minimum=0, maximum=0.9999999)
    beta2: float = option(0.95, help="decay of the second moment", minimum=0, maximum=0.9999999)
    eps: float = option(1e-8, help="added to the denominator", minimum=0)
    weight_decay: float = option(0.1, help="decoupled weight decay on matrices", minimum=0)
    max_grad_norm: float | None = option(None, help="clip gradients to this global norm (default: no clipping)")

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise UserError(f"max_grad_norm must be above 0, got {self.max_grad_norm}: leave it out for no clipping")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The tiers that hold weights and optimizer state.

    Besides `dram` a run needs memory for its code, activations and the gradients of one Unit (of all Units
    when they are clipped), and while a checkpoint is written up to `snapshot`.
    """

    dram: int | None = option(
        None, help="DRAM for weights and optimizer state, such as 20GiB (default: all)", size=True
    )
    flash: Path | None = option(None, help="folder for what does not fit into DRAM")
    snapshot: int | None = option(
        None,
        help="DRAM for copies while a checkpoint is written (default: 10 % of dram; as needed if there is no dram)",
        size=True,
    )
    wire: Literal["fp32", "bf16"] = option("fp32", help="what is streamed; bf16 keeps the exact fp32 master beside it")
