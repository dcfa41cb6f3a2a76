"""Where the state lives changes nothing: any mix of tiers, with checkpoints on the way, equals the reference."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from openwafer.graph import Graph, capture
from openwafer.graph.deferred import initialise
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.flash import FlashTier
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import close_tiers, open_tiers, place
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier, Key, Tier
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.reference import Reference, State
from openwafer.train.streamed import Streamed, fill

STEPS = 50
CHECKPOINTS = (7, 8, 30)
TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "vocab_size": 61, "max_position_embeddings": 8}


def text(step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 61, (2, 2, 8), generator=generator)
    return [{"input_ids": part, "labels": (part * 5 + 3) % 61} for part in ids]


def gpt() -> nn.Module:
    """Tied embedding, dropout, a frozen weight."""
    module = build(ModelConfig(**TINY, dropout=0.1))
    module.get_parameter("transformer.h.0.mlp.c_fc.weight").requires_grad_(False)
    return module


def llama() -> nn.Module:
    return build(ModelConfig(family="llama", **TINY, num_kv_heads=2))


def buffers_of(module: nn.Module, graph: Graph) -> dict[str, torch.Tensor]:
    return dict(initialise(module, [name for name in graph.buffers if name not in graph.constants], 0))


def schedule(step: int) -> float:
    return 1.0 / (1 + step / 10)


CASES: dict[str, tuple[Callable[[], nn.Module], OptimizerConfig]] = {
    "gpt clipped": (gpt, OptimizerConfig(lr=1e-2, max_grad_norm=0.5)),
    "llama immediate": (llama, OptimizerConfig(lr=1e-2)),
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Graph, OptimizerConfig, dict[int, Tensors], list[float]]:
    """A model, and its state and losses as the reference has them."""
    make, config = CASES[request.param]
    torch.manual_seed(0)
    module = make()
    graph = capture(module.train(), (), text(0)[0])
    state = State(
        weights={n: t.clone() for n, t in initialise(module, graph.weights, 0)}, buffers=buffers_of(module, graph)
    )
    reference = Reference(graph=graph, state=state, config=config, schedule=schedule, seed=3)
    states, losses = {}, []
    for step in range(1, STEPS + 1):
        losses.append(reference.step(text(step)).loss)
        if step in CHECKPOINTS or step == STEPS:
            states[step] = {name: tensor.clone() for name, tensor in reference.tensors()}
    return module, graph, config, states, losses


def tiers_of(kind: str, graph: Graph, config: OptimizerConfig, folder: Path) -> dict[Key, Tier]:
    optimizer = make_optimizer(config)
    specs = fields(graph, optimizer)
    total = sum(spec.num_bytes for spec in specs)
    if kind == "dram":
        return dict.fromkeys([spec.key for spec in specs], DramTier(snapshot_bytes=total // 5))
    if kind.startswith("flash"):  # "flash kept": with as few buffers as it can work with
        pool = total * 3 // 4 if kind == "flash" else total * 2 // 5
        return dict.fromkeys([spec.key for spec in specs], FlashTier(folder, pool, num_threads=2))
    # "budget": as the command line does it; "striped": fields in turn, whatever they are
    if kind == "budget":
        memory = MemoryConfig(dram=total * 3 // 4, flash=folder)
        placement = place(graph, optimizer, memory)
        assert placement.flash
        assert placement.dram
        return open_tiers(placement, memory)
    dram, flash = DramTier(snapshot_bytes=0), FlashTier(folder, total // 2, num_threads=1)
    return {spec.key: (dram, flash)[index % 2] for index, spec in enumerate(specs)}


class Reader(threading.Thread):
    """Reads frozen state slowly enough for training to run into it."""

    def __init__(self, engine: Streamed) -> None:
        super().__init__()
        self.frozen = engine.freeze()
        self.found: Tensors = {}

    def run(self) -> None:
        for name, tensor in self.frozen.tensors:
            self.found[name] = tensor.clone()
            threading.Event().wait(0.002)
        self.frozen.close()


@pytest.mark.parametrize("kind", ["dram", "flash", "budget", "striped", "flash kept"])
def test_fifty_steps_on_any_tier(case: Any, kind: str, tmp_path: Path) -> None:
    module, graph, config, states, losses = case
    tiers = tiers_of(kind, graph, config, tmp_path)
    store = Store(graph, make_optimizer(config), tiers)
    fill(store, initialise(module, graph.weights, 0))
    recompute = kind != "flash kept"
    streamed = Streamed(graph, store, buffers_of(module, graph), config, schedule, seed=3, recompute=recompute)
    readers: dict[int, Reader] = {}
    for step in range(1, STEPS + 1):
        assert streamed.step(text(step)).loss == losses[step - 1], step
        if step in CHECKPOINTS or step == STEPS:
            for frozen_step, reader in readers.items():
                reader.join()
                assert_equal(reader.found, states[frozen_step])
            readers = {step: Reader(streamed)}
            readers[step].start()
    readers[STEPS].join()
    assert_equal({name: tensor.clone() for name, tensor in streamed.tensors()}, states[STEPS])
    close_tiers(tiers)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
