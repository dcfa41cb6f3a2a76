"""Striped stores hold, send and update what one store would, to the bit."""

import itertools

import pytest
import torch
from torch import nn

from openwafer.errors import UserError
from openwafer.graph import capture
from openwafer.kernels.squares import square_sums
from openwafer.memoryx.config import SGD, Adafactor, AdamW, Lion, OptimizerConfig
from openwafer.memoryx.norm import global_norm
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.store import WIRE, Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.memoryx.update import UpdateNumbers
from openwafer.swarmx.stripe import Stripe, check_stripes, cut_values, stripes


class Model(nn.Module):
    """A matrix of several blocks that is not a multiple of one, small ones, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(300, 201), nn.Linear(201, 70)])
        self.head = nn.Linear(70, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).mean()


def store_of(part: Stripe, config: OptimizerConfig) -> Store:
    optimizer, tier = make_optimizer(config), DramTier()
    return Store(part.graph, optimizer, {spec.key: tier for spec in fields(part.graph, optimizer)})


@pytest.mark.parametrize("config", [AdamW(lr=0.1), SGD(lr=0.1), Lion(lr=0.1), Adafactor()], ids=lambda c: c.kind)
@pytest.mark.parametrize("num_stores", [2, 3])
def test_updates_of_stripes_are_those_of_the_whole(config: OptimizerConfig, num_stores: int) -> None:
    torch.manual_seed(0)
    module = Model()
    graph = capture(module.train(), (torch.zeros(2, 300),))
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    (whole,) = stripes(graph, make_optimizer(config), 1)
    parts = stripes(graph, make_optimizer(config), num_stores)
    stores = [store_of(part, config) for part in (whole, *parts)]
    for part, store in zip((whole, *parts), stores, strict=True):
        store.write_all((name, WIRE, value) for name, value in cut_values(part, weights.items()))
    for step in range(1, 4):
        gradients = {name: torch.randn(value.shape) for name, value in weights.items()}
        squares = []
        for part, store in zip((whole, *parts), stores, strict=True):
            mine = [[square_sums(g) for _, g in cut_values(part, gradients.items())]]
            squares += mine
            for unit in part.graph.units:
                of_unit = {w.name: part.cut(w.name, gradients[w.name]).clone() for w in part.graph.owned(unit)}
                if of_unit:
                    store.update(unit, of_unit, UpdateNumbers(lr=0.1, step=step, divisor=3.0))
        assert global_norm(squares[0]) == global_norm([s for part in squares[1:] for s in part])
    expected = {(name, field): value.clone() for name, field, value in stores[0].read_all()}
    for part, store in zip(parts, stores[1:], strict=True):
        assert part.ranges, "every store has something"
        for name, field, value in store.read_all():
            assert torch.equal(part.cut(name, expected[name, field]).reshape(-1), value.reshape(-1)), (name, field)
    for name, value in weights.items():
        runs = sorted((part.ranges[name].start, part.ranges[name].stop) for part in parts if name in part.ranges)
        assert runs[0][0] == 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(runs))
        assert runs[-1][1] == value.numel()


def test_more_stores_than_blocks() -> None:
    graph = capture(Model().train(), (torch.zeros(2, 300),))
    with pytest.raises(UserError, match=r"num_memoryx 40 is more than the \d+ blocks"):
        check_stripes(graph, 40)
