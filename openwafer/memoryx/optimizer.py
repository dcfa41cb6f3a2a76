"""The optimizer of a run: its update rule, with the settings of each weight.

An optimizer sees one weight at a time, in its own shape, with its state; where these live is the store's matter.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.groups import group_of
from openwafer.memoryx.optimizers.adafactor import Adafactor
from openwafer.memoryx.optimizers.adam import Adam, AdamW
from openwafer.memoryx.optimizers.lion import Lion
from openwafer.memoryx.optimizers.rule import Rule, Shape
from openwafer.memoryx.optimizers.sgd import SGD

__all__ = ["Optimizer", "Shape", "make_optimizer"]

RULES = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "lion": Lion, "adafactor": Adafactor}


class Optimizer:
    """Updates one weight in place. State starts at zero and is kept in `state_dtype`."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self.rule: Rule = RULES[config.kind](**config.options)
        self.state_dtype = torch.bfloat16 if config.state_dtype == "bf16" else torch.float32
        self._group_of = functools.cache(lambda name: group_of(name, config.groups))

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Names and shapes of the state of a weight of this shape."""
        return self.rule.state_shapes(shape)

    def update(
        self, name: str, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, lr: float, step: int
    ) -> None:
        """One update; `step` counts from 1, `lr` is the step's before groups. `gradient` may be changed too."""
        wide = {key: value.float() for key, value in state.items()}  # itself where it is fp32
        self.rule.update(
            weight, gradient, wide, lr=lr * self.lr_scale(name), weight_decay=self.decay(name, weight), step=step
        )
        if self.state_dtype != torch.float32:
            for key, value in state.items():
                value.copy_(wide[key])

    def lr_scale(self, name: str) -> float:
        group = self._group_of(name)
        return 1.0 if group is None else group.lr_scale

    def decay(self, name: str, weight: Tensor) -> float:
        """The weight decay of a weight: its group's, else the general one on matrices only."""
        group = self._group_of(name)
        if group is not None and group.weight_decay is not None:
            return group.weight_decay
        return self.config.weight_decay if weight.dim() >= 2 else 0.0


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    return Optimizer(config)
