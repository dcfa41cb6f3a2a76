"""What MemoryX does with weights: the optimizer, and the memory it may use. This module imports no torch.

From Python, `AdamW(lr=3e-4)` and its siblings are OptimizerConfig with the kind filled in.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openwafer.config import conform, option
from openwafer.errors import UserError

Kind = Literal["sgd", "adam", "adamw", "lion", "adafactor"]

# The options of each kind with their defaults; `lr` and `weight_decay` are options of all.
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05, "weight_decay": 0.0, "momentum": 0.9, "nesterov": False},
    "adam": {"lr": 3e-4, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "adamw": {"lr": 3e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    # Its steps are all of size lr, so it wants a third of AdamW's rate and three times its decay.
    "lion": {"lr": 1e-4, "weight_decay": 0.3, "beta1": 0.9, "beta2": 0.99},
    "adafactor": {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-3},
}
# bf16 has 8 bits: a moment that moves by less than about 1/256 of itself per step is rounded to a standstill.
_MAX_BF16_BETA = 0.99


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Settings for the weights whose names match; a name belongs to the first group that matches it."""

    match: str | tuple[str, ...] = option(help="pattern of weight names such as '*.norm.weight', or several")
    lr_scale: float = option(1.0, help="factor on the learning rate", minimum=0)
    weight_decay: float | None = option(None, help="instead of the optimizer's, also on norms and biases", minimum=0)
    frozen: bool = option(False, help="not trained: no gradient, no optimizer state")

    def __post_init__(self) -> None:
        conform(self)
        if not self.patterns or not all(self.patterns):
            raise UserError(f"a group of weights needs a pattern such as '*.bias' in `match`, got {self.match!r}")
        if self.frozen and (self.lr_scale != 1.0 or self.weight_decay is not None):
            raise UserError(f"group {self.match!r} is frozen: lr_scale and weight_decay would do nothing")

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else self.match


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights are updated. Weights with fewer than two dimensions (norms, biases) are not decayed.

    What is left out is filled in with the default of the kind.
    """

    kind: Kind = option("adamw", help="optimizer")
    lr: float = option(None, help="base learning rate (default: by kind, adamw 3e-4)", minimum=0)
    weight_decay: float = option(
        None, help="decay of matrices: of the weight (adamw, lion, adafactor) or in the gradient (sgd, adam)", minimum=0
    )
    beta1: float | None = option(
        None, help="adam, adamw, lion: decay of the first moment", minimum=0, maximum=0.9999999
    )
    beta2: float | None = option(None, help="adam, adamw, lion: decay of the second", minimum=0, maximum=0.9999999)
    eps: float | None = option(
        None, help="adam, adamw: added to the denominator; adafactor: least scale of a weight", minimum=0
    )
    momentum: float | None = option(None, help="sgd: decay of the velocity (0: none)", minimum=0, maximum=0.9999999)
    nesterov: bool | None = option(None, help="sgd: look ahead along the velocity")
    state_dtype: Literal["fp32", "bf16"] = option("fp32", help="how moments are stored; computed in fp32 either way")
    groups: tuple[GroupConfig, ...] = option((), help="settings for some weights: a list of {match, lr_scale, ...}")
    max_grad_norm: float | None = option(None, help="clip gradients to this global norm (default: no clipping)")
    max_grad_value: float | None = option(None, help="clip each element of the gradients to this size")
    loss_scale: Literal["dynamic"] | float | None = option(
        None, help="what the loss is multiplied by in backward: a power of two, or dynamic"
    )
    loss_scale_window: int = option(1000, help="dynamic: steps without overflow before the scale doubles", minimum=1)
    nan: Literal["stop", "skip"] = option(
        "stop", help="when the loss or a gradient is not finite: stop, or skip the step"
    )

    def __post_init__(self) -> None:
        conform(self)
        self._fill_in()
        for name in ("max_grad_norm", "max_grad_value"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name} must be above 0, got {value}: leave it out for no clipping")
        if self.max_grad_norm is not None and self.max_grad_value is not None:
            raise UserError("max_grad_norm and max_grad_value are two ways to clip: give one of them")
        if isinstance(self.loss_scale, (int, float)) and math.frexp(self.loss_scale)[0] != 0.5:
            raise UserError(f"loss_scale must be a power of two such as 1024, or dynamic, got {self.loss_scale}")
        if self.nesterov and not self.momentum:
            raise UserError("nesterov needs a momentum above 0, such as 0.9")
        if self.state_dtype == "bf16":
            self._check_bf16()

    def _fill_in(self) -> None:
        options = OPTIONS[self.kind]
        known = {name for kind in OPTIONS.values() for name in kind}
        for name in sorted(known - options.keys()):
            if getattr(self, name) is not None:
                raise UserError(
                    f"{name} {getattr(self, name)} does nothing for {self.kind}; it has: {', '.join(options)}"
                )
        for name, default in options.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    def _check_bf16(self) -> None:
        if self.kind == "adafactor":
            raise UserError(
                "state_dtype bf16 is not for adafactor, whose state is a few rows and columns: leave it out"
            )
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            if value is not None and value > _MAX_BF16_BETA:
                raise UserError(
                    f"{name} {value} is too slow for state_dtype bf16, which rounds such small changes away: "
                    f"at most {_MAX_BF16_BETA}"
                )

    @property
    def options(self) -> dict[str, Any]:
        """The options of this kind besides `lr` and `weight_decay`, which may differ by weight."""
        return {name: getattr(self, name) for name in OPTIONS[self.kind] if name not in ("lr", "weight_decay")}


SGD = functools.partial(OptimizerConfig, kind="sgd")
Adam = functools.partial(OptimizerConfig, kind="adam")
AdamW = functools.partial(OptimizerConfig, kind="adamw")
Lion = functools.partial(OptimizerConfig, kind="lion")
Adafactor = functools.partial(OptimizerConfig, kind="adafactor")


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
    clipping: Literal["auto", "speculative", "deferred"] = option(
        "auto",
        help="cuda, with a norm to clip to: update into spare memory before the norm is known, or wait for it "
        "(default: speculative where no dram budget is given and the memory is there)",
    )

    def __post_init__(self) -> None:
        conform(self)
