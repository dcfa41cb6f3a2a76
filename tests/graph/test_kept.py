"""A Unit that keeps its activations keeps nothing of its weights, and gives the same gradients to the bit."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from openwafer.graph import Graph, Unit, capture
from openwafer.graph.kept import KeptUnit
from openwafer.graph.randomness import set_seed
from openwafer.graph.run import backward_unit, bind_inputs, forward_unit


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x))) * self.layer.bias


class Views(nn.Module):
    """Saves parts of its weights for backward, in several shapes, and one read as another type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 8))
        self.second = nn.Parameter(torch.randn(8, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.first[1:5].t() @ self.first[::2, :4].t()[:, :3]
        y = y * self.second[2:5, 1, :1].squeeze(-1) @ self.second.permute(2, 1, 0)[0]
        return y * torch.view_as_complex(self.second[:, 0].contiguous()).abs() * self.second[3, 0, 1]


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.layer(x)), 0.5, self.training)


CASES: list[Callable[[], nn.Module]] = [Linear, Views, Random]


def captured(make: Callable[[], nn.Module]) -> tuple[Graph, Unit, dict[str, Tensor], dict[str, Tensor]]:
    """One Unit around the module, its weights in one flat array as a store has them, and its buffers."""
    torch.manual_seed(0)
    module = nn.Sequential(make()).train()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Model()
    graph = capture(model, (torch.zeros(4, 8),))
    (unit,) = graph.units
    values = dict(model.named_parameters())
    weights = flat({name: values[name].detach() for name in unit.weights}, torch.full((512,), 7.0))
    return graph, unit, weights, dict(model.named_buffers())


def flat(values: dict[str, Tensor], memory: Tensor) -> dict[str, Tensor]:
    """The weights copied into parts of `memory`."""
    parts, start = {}, memory.storage_offset() + 16
    for name, value in values.items():
        parts[name] = memory.as_strided(value.shape, value.stride(), start)
        parts[name].copy_(value)
        start += 16 * (value.numel() // 16 + 1)
    return parts


def seed(unit: Unit) -> None:
    set_seed(unit.index + 11)


@pytest.mark.parametrize("make", CASES)
def test_backward_reads_the_weights_that_are_streamed_then(make: Callable[[], nn.Module]) -> None:
    graph, unit, weights, buffers = captured(make)
    x = torch.randn(4, 8)
    values = bind_inputs(graph, (x,))
    expected, changed = forward_unit(unit, weights, buffers, values, seed)
    heads = {name: torch.randn_like(output) for name, output in zip(unit.outputs, expected, strict=True)}
    of_weights, of_values = backward_unit(graph, unit, weights, buffers, values, heads, seed)

    before = {name: weight.clone() for name, weight in weights.items()}
    kept = KeptUnit(graph, unit, weights, buffers, values, seed)
    for weight in weights.values():
        weight.fill_(torch.nan)  # as when another Unit takes the slot
    elsewhere = flat(before, torch.zeros(1000)[300:])
    kept_of_weights, kept_of_values = kept.backward(elsewhere, heads)

    assert all(torch.equal(a, b) for a, b in zip(kept.outputs, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept.changed, changed, strict=True))
    assert kept_of_weights.keys() == of_weights.keys()
    assert of_weights.keys() == set(unit.weights)
    for name, gradient in [*of_weights.items(), *of_values.items()]:
        assert torch.equal((kept_of_weights | kept_of_values)[name], gradient), name


@pytest.mark.parametrize("make", CASES)
def test_no_weight_is_held(make: Callable[[], nn.Module]) -> None:
    graph, unit, weights, buffers = captured(make)
    memory = np.zeros(512, np.float32)
    is_alive = weakref.ref(memory)
    streamed = flat(weights, torch.from_numpy(memory))
    del memory
    kept = KeptUnit(graph, unit, streamed, buffers, bind_inputs(graph, (torch.randn(4, 8),)), seed)
    assert is_alive() is not None
    del streamed
    assert is_alive() is None, "something still holds the memory of the weights"
    heads = {name: torch.ones_like(output) for name, output in zip(unit.outputs, kept.outputs, strict=True)}
    of_weights, _ = kept.backward(weights, heads)
    assert all(torch.isfinite(gradient).all() for gradient in of_weights.values())


@pytest.mark.parametrize("make", CASES)
def test_a_forward_that_is_given_up_leaves_nothing(make: Callable[[], nn.Module]) -> None:
    graph, unit, weights, buffers = captured(make)
    memory = np.ones((4, 8), np.float32)
    is_alive = weakref.ref(memory)
    values = bind_inputs(graph, (torch.from_numpy(memory),))
    del memory
    gc.disable()  # freed at once, not when Python looks for cycles
    try:
        kept = KeptUnit(graph, unit, weights, buffers, values, seed)
        del values
        assert is_alive() is not None
        del kept
        assert is_alive() is None
    finally:
        gc.enable()
