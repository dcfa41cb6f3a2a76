"""A line of PEs: the columns of a layout from west to east, or its rows from north to south.

What is routed or placed at an index of the axis applies to every PE across it, so a collective along x runs in all
rows at once.
"""

from dataclasses import dataclass
from typing import Literal

from openwafer.fabric.layout import EAST, NORTH, SOUTH, WEST, Directions, Layout, Rect


@dataclass(frozen=True)
class Axis:
    layout: Layout
    name: Literal["x", "y"]

    @property
    def length(self) -> int:
        return self.layout.width if self.name == "x" else self.layout.height

    @property
    def forward(self) -> int:
        """The direction of growing index."""
        return EAST if self.name == "x" else SOUTH

    @property
    def backward(self) -> int:
        return WEST if self.name == "x" else NORTH

    def rect(self, start: int, count: int = 1) -> Rect:
        if self.name == "x":
            return Rect(start, 0, count, self.layout.height)
        return Rect(0, start, self.layout.width, count)

    def route(self, colour: int, start: int, inputs: Directions, outputs: Directions, count: int = 1) -> None:
        if count > 0:
            self.layout.route(colour, self.rect(start, count), inputs, outputs)
