"""The parts of a training engine put together: placement, tiers, store, workers; and closed again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from openwafer.checkpoint import Checkpoint
from openwafer.csx.link import Link
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.graph.deferred import initialise
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import Placement, check_space_to_save, close_tiers, open_tiers, place
from openwafer.memoryx.store import Store, Wire
from openwafer.memoryx.tier import Key, Tier
from openwafer.swarmx.stripe import Stripe, cut_reader, cut_values, stripes
from openwafer.train import guard
from openwafer.train.config import Precision
from openwafer.train.followers import Follower
from openwafer.train.streamed import Streamed, fill, restore
from openwafer.train.swarm import Swarm


class Workers(Protocol):
    """Whoever computes, where it is not simply this process on the store's own memory."""

    def open_tiers(self, placement: Placement, config: MemoryConfig) -> dict[Key, Tier]:
        """Tiers that the workers can read from."""
        ...

    def attach(
        self, graph: Graph, store: Store, seed: int, options: Mapping[str, Any]
    ) -> tuple[Link, Swarm | Follower | None]:
        """The workers take up the graph."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an engine is made from."""

    graph: Graph
    module: nn.Module  # gives the initial values
    optimizer: OptimizerConfig
    schedule: Callable[[int], float]
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    precision: Precision = "fp32"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of the worker: recompute and the like
    saves_while_training: bool = False  # then a flash folder needs room for what changes meanwhile
    part: Stripe | None = None  # what this store holds, where there are several


class Assembly:
    """An engine and what it stands on. It must be closed; the workers are closed by whoever made them."""

    def __init__(self, plan: Plan, workers: Workers | None = None, stored: Checkpoint | None = None) -> None:
        """From the checkpoint `stored` if there is one, else from the model's own initialisation."""
        self.plan = plan
        wire: Wire = plan.precision
        optimizer = make_optimizer(plan.optimizer)
        self.part = plan.part or stripes(plan.graph, optimizer, 1)[0]
        self.placement = place(self.part.graph, optimizer, plan.memory, wire)
        self.tiers = (workers.open_tiers if workers else open_tiers)(self.placement, plan.memory)
        try:
            if plan.saves_while_training:
                check_space_to_save(self.placement, plan.memory)
            store = Store(self.part.graph, optimizer, self.tiers, wire)
            options = dict(plan.options)
            if workers is not None:
                link, swarm = workers.attach(plan.graph, store, plan.seed, options)
                options |= {"link": link, "swarm": swarm}
            buffers = self._fill(store, stored)
            self.engine = Streamed(plan.graph, store, buffers, plan.optimizer, plan.schedule, plan.seed, **options)
            if stored is not None:
                self._resume(stored)
        except BaseException:
            close_tiers(self.tiers)
            raise

    def _fill(self, store: Store, stored: Checkpoint | None) -> dict[str, Tensor]:
        """Weights into the store; gives the buffers."""
        plan, graph = self.plan, self.plan.graph
        names = [name for name in graph.buffers if name not in graph.constants]
        if stored is None:
            fill(store, cut_values(self.part, initialise(plan.module, self.part.graph.weights, plan.seed)))
            return _typed(graph, dict(initialise(plan.module, names, plan.seed)))
        has = set(stored.names())
        _check_same_model(graph, stored)
        restore(store, cut_reader(self.part, stored.read), with_state=stored.step > 0)
        # Imported weights come without the buffers that the model computes for itself.
        lacking = [name for name in names if f"buffers/{name}" not in has]
        values = dict(initialise(plan.module, lacking, plan.seed))
        values |= {name: stored.read(f"buffers/{name}").clone() for name in names if name not in values}
        return _typed(graph, values)

    def _resume(self, stored: Checkpoint) -> None:
        self.engine.num_steps_done = stored.step
        if guard.STATE in stored.names():
            self.engine.guard.restore(stored.read(guard.STATE))

    def close(self) -> None:
        close_tiers(self.tiers)


def _check_same_model(graph: Graph, stored: Checkpoint) -> None:
    """A model whose Units changed since the checkpoint is another model."""
    shapes = {name.removeprefix("weights/"): stored.shape(name) for name in stored.names("weights/")}
    for name, weight in graph.weights.items():
        if name not in shapes:
            raise UserError(f"{stored.folder} holds another model: it has no {name!r}")
        if shapes[name] != tuple(weight.spec.shape):
            raise UserError(
                f"{stored.folder} holds another model: {name!r} is {list(shapes[name])} there and "
                f"{list(weight.spec.shape)} here"
            )
    extra = sorted(shapes.keys() - graph.weights.keys())
    if extra and stored.step > 0:  # imported weights may have some that the model never reads
        raise UserError(f"{stored.folder} holds another model: it has {extra[0]!r}, which this one has not")


def _typed(graph: Graph, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone().to(graph.buffers[name].dtype) for name, value in buffers.items()}
