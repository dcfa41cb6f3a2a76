"""Compiled Units: one compilation per distinct function, the same random numbers, and a way on without a compiler."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from openwafer.csx.worker import Worker
from openwafer.graph import Graph, Unit, capture
from openwafer.graph import compiled as module
from openwafer.graph.compiled import CompiledFunction, compiled

# torch.compile warns about its own insides.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo force disabled")
CPU = torch.device("cpu")
NO_COMPILER = {"cpp.cxx": (None, "/nonexistent/c++"), "force_disable_caches": True}
LAYERS = 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(x @ self.weight), 0.3, self.training)


class Homogeneous(nn.Module):
    """Its loss is linear in each of its matrices, so it is the product of any of them with its gradient: with the
    gradient of the very network that ran, masks included."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(24, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.rand(16, 24, generator=generator)} for _ in range(count)]


def homogeneous() -> tuple[Graph, dict[str, Tensor]]:
    torch.manual_seed(0)
    network = Homogeneous().train()
    graph = capture(network, (), batches(1)[0])
    return graph, {name: weight.detach() for name, weight in network.named_parameters()}


def gradients(
    graph: Graph, weights: dict[str, Tensor], *, recompute: bool = True, num_batches: int = 1
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step and the gradient of every weight, as a worker computes them."""

    def stream(order) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
        for unit in order:
            yield unit, {name: weights[name] for name in unit.weights}

    worker = Worker(graph, 5, recompute=recompute)
    done = worker.forward(stream, batches(num_batches), {}, 0)
    found: dict[str, Tensor] = {}
    for _, of_unit in worker.backward(stream, done):
        found |= of_unit
    return done.loss, found


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Whether there is a compiler is found out anew."""
    module._can_compile.cache_clear()
    torch.compiler.reset()
    counters.clear()
    yield
    module._can_compile.cache_clear()
    torch.compiler.reset()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == module.__name__]


def test_twelve_layers_compile_two_functions_that_draw_the_same_masks() -> None:
    graph, weights = homogeneous()
    fast = compiled(graph, CPU)
    assert [unit.name for unit in fast.units] == [unit.name for unit in graph.units]
    assert len(fast.units) == LAYERS + 1
    assert len(fast.functions) == 2
    assert all(isinstance(function, CompiledFunction) for function in fast.functions)

    probe = counters["stats"]["unique_graphs"]
    loss, found = gradients(fast, weights)
    # The layers' function without autograd (forward) and with it (backward), where the first layer differs: nobody
    # wants the gradient of its input. The head, as the last Unit of one micro-batch, runs once, with autograd.
    assert counters["stats"]["unique_graphs"] - probe == 1 + 2 + 1
    for name, gradient in found.items():
        assert (weights[name] * gradient).sum().item() == pytest.approx(loss, rel=1e-4), name

    again = gradients(fast, weights)
    assert again[0] == loss
    assert all(torch.equal(again[1][name], gradient) for name, gradient in found.items())
    expected_loss, expected = gradients(graph, weights)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    kept_loss, kept = gradients(fast, weights, recompute=False)
    assert kept_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(kept, found, rtol=1e-4, atol=1e-5)
    gradients(fast, weights, num_batches=2)
    assert counters["stats"]["unique_graphs"] - probe == 2 + 2 + 1, "nothing new was compiled for any of this"


def test_without_a_compiler_units_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    graph, _ = homogeneous()
    with inductor.patch(NO_COMPILER), caplog.at_level(logging.WARNING, logger=module.__name__):
        assert compiled(graph, CPU) is graph
        assert compiled(graph, CPU) is graph
    (warning,) = warnings_of(caplog)
    assert "nothing is compiled" in warning
    assert "/nonexistent/c++" in warning


def test_a_function_that_fails_to_compile_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    graph, weights = homogeneous()
    fast = compiled(graph, CPU)
    # A compiler that was there a moment ago: the first call is the first to notice.
    with inductor.patch(NO_COMPILER), caplog.at_level(logging.WARNING, logger=module.__name__):
        loss, found = gradients(fast, weights)
    assert [warning.split(":")[0] for warning in warnings_of(caplog)] == [
        f"Unit function {function.index} runs uncompiled" for function in fast.functions
    ]
    expected_loss, expected = gradients(graph, weights)
    assert loss == expected_loss
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
