"""What cannot be captured is refused with the module, the line and what to change."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from openwafer.errors import UserError
from openwafer.graph import capture


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Branching(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line to be named
            x = -x
        return self.linear(x)


class Selecting(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[x[:, 0] > 0]  # shape depends on values


class Stateful(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table.scale


class Table:
    scale: torch.Tensor


class WithCache(Layer):
    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return self.linear(x)


class Broken(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, :3])


@pytest.mark.parametrize(
    ("bad", "line", "advice"),
    [
        (Branching, "if x.sum() > 0:", "torch.where"),
        (Selecting, "[x[:, 0] > 0]", "mask of fixed shape"),
        (Broken, "self.linear(x[:, :3])", "outside openwafer"),
    ],
)
def test_the_sentence_names_module_line_and_remedy(bad: type[Layer], line: str, advice: str) -> None:
    with pytest.raises(UserError) as caught:
        capture(Stack(Layer(), bad(), Layer()), (torch.zeros(2, 4),))
    message = str(caught.value)
    assert "\n" not in message
    assert "layers.1" in message
    assert bad.__name__ in message or "Linear" in message
    assert re.search(r"test_blame\.py:\d+", message)
    assert line in message
    assert advice in message


def test_a_tensor_smuggled_into_a_block_is_named() -> None:
    class Smuggling(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = Table()
            table.scale = x.mean()
            for layer in self.layers:
                layer.table = table
            return super().forward(x)

    with pytest.raises(UserError, match=r"'layers\.0' reads a tensor computed outside it.*pass it to the block"):
        capture(Smuggling(Stateful(), Stateful()), (torch.zeros(2, 4),))


def test_an_object_passed_to_a_block_is_named() -> None:
    class Caching(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, cache=Table())
            return x

    with pytest.raises(UserError, match=r"'layers\.0' receives a Table"):
        capture(Caching(WithCache(), WithCache()), (torch.zeros(2, 4),))


def test_a_tensor_changed_in_place_and_read_later_is_refused() -> None:
    class InPlace(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return self.linear(x)

    class Rereading(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layers[0](x)
            y = self.layers[1](h)
            return self.layers[2](y) + h

    with pytest.raises(UserError, match="changes a tensor in place that is read again later"):
        capture(Rereading(Layer(), InPlace(), Layer()), (torch.zeros(2, 4),))


def test_wrong_example_inputs() -> None:
    with pytest.raises(UserError, match="example inputs match"):
        capture(Stack(Layer()), (torch.zeros(2, 4), torch.zeros(2, 4)))


def test_a_failed_capture_leaves_no_trace() -> None:
    stack = Stack(Layer(), Branching())
    with pytest.raises(UserError):
        capture(stack, (torch.zeros(2, 4),))
    assert not torch.compiler.is_exporting()
    assert all(not m._forward_hooks and "forward" not in m.__dict__ for m in stack.modules())
    assert len(capture(Stack(Layer(), Layer()), (torch.zeros(2, 4),)).units) == 2
