import pickle
from typing import Any

import torch
from torch import Tensor, nn

from openwafer.graph import capture
from openwafer.graph.unit import Graph, Unit


class Noisy(nn.Module):
    """Makes tensors from nothing, and has code inside code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * torch.arange(4, dtype=torch.float32) + torch.rand(4)
        with torch.no_grad():
            scale = hidden.abs().amax() + 1
        return self.second(hidden / scale).mean()


def arrived(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def sent_and_arrived() -> tuple[Graph, list[Unit]]:
    graph = capture(Noisy().train(), (torch.randn(2, 4),), {})
    return graph, arrived(graph.units)


def outputs(graph: Graph, unit: Unit, device: str = "cpu") -> tuple[Tensor, ...]:
    specs = [graph.weights[name].spec for name in unit.weights], [graph.values[name] for name in unit.inputs]
    weights, inputs = ([torch.ones(spec.shape, dtype=spec.dtype, device=device) for spec in part] for part in specs)
    assert not unit.buffers
    return unit.function(weights, [], inputs)[0]


def test_code_arrives_as_it_was_sent() -> None:
    graph, units = sent_and_arrived()
    text = "".join(str(unit.function.code.graph) for unit in graph.units)
    assert "torch.ops.aten.rand.default" in text
    assert "get_attr" in text
    for unit, other in zip(graph.units, units, strict=True):
        assert str(other.function.code.graph) == str(unit.function.code.graph)
        assert other.function.code.code == unit.function.code.code


def test_shared_functions_stay_shared() -> None:
    graph, _ = sent_and_arrived()
    first, second = arrived([graph.units[0].function] * 2)
    assert first is second


def test_random_numbers_are_drawn_anew_after_the_journey() -> None:
    graph, units = sent_and_arrived()
    index = next(unit.index for unit in graph.units if "aten.rand" in str(unit.function.code.graph))
    drawn = []
    for unit in (graph.units[index], units[index]):
        torch.manual_seed(1)
        drawn.append([outputs(graph, unit)[0] for _ in range(2)])
    assert not torch.equal(*drawn[0])
    assert torch.equal(torch.stack(drawn[0]), torch.stack(drawn[1]))


def test_code_that_arrived_runs_on_another_device() -> None:
    graph, units = sent_and_arrived()
    assert all(output.is_meta for unit in units for output in outputs(graph, unit, "meta"))
