"""Checkpoints of several stores: pieces are gathered while training goes on, and are those of one moment."""

import collections
import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from openwafer.graph import Graph, capture
from openwafer.memoryx.config import Adafactor, OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.memoryx.update import UpdateNumbers
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.swarmx.message import Message
from openwafer.swarmx.stripe import Stripe, stripes
from openwafer.train.followers import Follower, Followers

CONFIG = ModelConfig(hidden_size=160, num_hidden_layers=1, num_heads=4, vocab_size=211, max_position_embeddings=8)
NUMBERS = UpdateNumbers(lr=0.1, step=1, divisor=1.0)


class Wire:
    """What `torch.distributed` is to two ranks: chunks in order by tag. Rank 1 sends, rank 0 receives."""

    def __init__(self) -> None:
        self.sent: dict[int, queue.Queue[Tensor]] = collections.defaultdict(queue.Queue)

    def send(self, chunks: list[Tensor], rank: int, tag: int) -> Any:
        self.sent[tag].put(chunks[0].clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, chunks: list[Tensor], rank: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: chunks[0].copy_(self.sent[tag].get(timeout=120)))


class Pair:
    """Two stores with everything random, the first's view of the second, and the second itself."""

    def __init__(self, config: OptimizerConfig) -> None:
        ids = torch.zeros(1, 8, dtype=torch.int64)
        self.graph: Graph = capture(build(CONFIG).train(), (), {"input_ids": ids, "labels": ids})
        optimizer = make_optimizer(config)
        self.parts = stripes(self.graph, optimizer, 2)
        self.whole: dict[tuple[str, str], Tensor] = {}
        self.stores = [self._store(part, config) for part in self.parts]
        world: Any = SimpleNamespace(bulk=Wire())
        told: Any = SimpleNamespace(send=self._hear)
        unused: Any = None
        self.followers = Followers(world, self.graph, self.parts, unused, [told])
        self.follower = Follower(world, unused, unused, unused)

    def _store(self, part: Stripe, config: OptimizerConfig) -> Store:
        optimizer, tier = make_optimizer(config), DramTier()
        store = Store(part.graph, optimizer, {spec.key: tier for spec in fields(part.graph, optimizer)})
        for name, weight in self.graph.weights.items():
            shapes = {"wire": weight.spec.shape, **optimizer.state_shapes(weight.spec.shape)}
            for field, shape in shapes.items():
                key = (name, field)
                if key not in self.whole:
                    generator = torch.Generator().manual_seed(len(self.whole))
                    self.whole[key] = torch.rand(shape, generator=generator)
                if name in part.ranges:
                    store.write(name, field, part.cut(name, self.whole[key]))
        return store

    def _hear(self, message: Message) -> None:
        assert message.fields == {"do": "save"}
        self.follower.send_pieces(self.stores[1])

    def train(self) -> None:
        """An update of every Unit in both stores."""
        for store in self.stores:
            for unit in store.graph.units:
                owned = store.graph.owned(unit)
                if owned:
                    store.update(unit, {w.name: torch.ones(w.spec.shape) for w in owned}, NUMBERS)


@pytest.mark.parametrize("config", [OptimizerConfig(), Adafactor()], ids=["adamw", "adafactor"])
def test_training_goes_on_and_the_checkpoint_is_of_the_moment_before(config: OptimizerConfig) -> None:
    pair = Pair(config)
    gathering = pair.followers.freeze(pair.stores[0])
    pair.train()  # nothing was read of the first store yet: this would wait for ever if it had to
    found = {(name, field): value.clone() for name, field, value in gathering.read_all()}
    gathering.close()
    assert found.keys() == pair.whole.keys()
    for key, value in pair.whole.items():
        assert torch.equal(found[key], value), key
    again = pair.followers.freeze(pair.stores[0])
    changed = {(name, field): value.clone() for name, field, value in again.read_all()}
    again.close()
    assert not any(torch.equal(changed[name, "wire"], found[name, "wire"]) for name in pair.graph.weights)


def test_a_checkpoint_that_is_given_up_leaves_nothing_for_the_next() -> None:
    pair = Pair(OptimizerConfig())
    gathering = pair.followers.freeze(pair.stores[0])
    values = gathering.read_all()
    next(values)
    gathering.close()
    again = pair.followers.freeze(pair.stores[0])
    for name, field, value in again.read_all():
        assert torch.equal(value, pair.whole[name, field]), (name, field)
    again.close()
    pair.follower.finish()
