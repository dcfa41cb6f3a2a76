"""Regions: the runs of layers that a model is cut into, one for each stage of a pipeline."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openwafer.errors import UserError
from openwafer.models.config import ModelConfig

Part = int | Literal["embedding", "head"]  # a layer's number, or what is before the first or after the last
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.")
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")
_HEAD = re.compile(r"(?:model\.norm|transformer\.ln_f|lm_head)\.")


@dataclass(frozen=True, kw_only=True)
class Region:
    """Layers `first` to `stop` of `num_layers`. The first region also embeds, the last has the norm and the output."""

    first: int
    stop: int
    num_layers: int

    @classmethod
    def whole(cls, config: ModelConfig) -> "Region":
        return cls(first=0, stop=config.num_hidden_layers, num_layers=config.num_hidden_layers)

    @property
    def embeds(self) -> bool:
        return self.first == 0

    @property
    def has_head(self) -> bool:
        return self.stop == self.num_layers

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)

    @property
    def body(self) -> list[Part]:
        """What runs on all tokens, in order: all but the head."""
        return [*(("embedding",) if self.embeds else ()), *self.layers]


def part_of(name: str, config: ModelConfig) -> Part:
    """Where a weight belongs. What no layer and no head knows goes to the embedding, which refuses strangers."""
    if (match := _LAYER.match(name)) and int(match[1]) < config.num_hidden_layers:
        return int(match[1])
    return "head" if _HEAD.match(name) else "embedding"


def is_wanted(name: str, part: Part, config: ModelConfig) -> bool:
    """Whether a part needs this weight to be whole; both names of a tied table are wanted at either end."""
    if config.tied and (name in _EMBEDDINGS or name == "lm_head.weight"):
        return part in ("embedding", "head")
    return part_of(name, config) == part


def split(costs: Sequence[float], head_cost: float, num_regions: int) -> list[Region]:
    """Regions of whole layers whose most costly one costs the least; the head's cost is in the last."""
    num_layers = len(costs)
    if num_regions > num_layers:
        raise UserError(
            f"num_csx {num_regions} is more than the {num_layers} layers of this model: a stage has at least one layer"
        )
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    before_end = [*before[:-1], before[-1] + head_cost]

    # best[s] of k regions: (cost of the most costly one, its cuts) of the layers before s; ties go to the earlier cut.
    best = {stop: (before_end[stop], (0,)) for stop in range(1, num_layers + 1)}
    for count in range(2, num_regions + 1):
        best = {
            stop: min(
                (max(best[cut][0], before_end[stop] - before[cut]), (*best[cut][1], cut))
                for cut in range(count - 1, stop)
            )
            for stop in range(count, num_layers + 1)
        }
    cuts = (*best[num_layers][1], num_layers)
    return [Region(first=first, stop=stop, num_layers=num_layers) for first, stop in itertools.pairwise(cuts)]
