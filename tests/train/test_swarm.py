"""Many workers give the bits of one: real processes, whatever the model, the split and the precision."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from openwafer.graph import capture
from openwafer.graph.deferred import initialise
from openwafer.memoryx.config import Adafactor, OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.swarmx.shared_memory import SharedTier
from openwafer.train.local_swarm import CsxPool, LocalSwarm, PoolConfig
from openwafer.train.streamed import Streamed, fill
from openwafer.train.swarm import Swarm, SwarmLink

STEPS = 30
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 61, "max_position_embeddings": 16}
CLIPPED = OptimizerConfig(lr=1e-2, max_grad_norm=0.5)
IMMEDIATE = OptimizerConfig(lr=1e-2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pool() -> Iterator[CsxPool]:
    """Four workers that serve one run after the other."""
    pool = CsxPool(PoolConfig(num_csx=4, threads=1, timeout_s=60))
    yield pool
    pool.close()


def text(step: int) -> list[dict[str, Any]]:
    """Five micro-batches: an uneven split for two, three and four workers. They differ in their counts."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for index in range(5):
        ids = torch.randint(0, 61, (2, 16), generator=generator)
        labels = (ids * 5 + 3) % 61
        labels[0, : index * 3] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def gpt() -> nn.Module:
    """Tied embedding, dropout."""
    return build(ModelConfig(**TINY, dropout=0.1))


def albert() -> nn.Module:
    """One block whose weights serve every layer."""
    config = transformers.AlbertConfig(
        hidden_size=32,
        embedding_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=61,
        hidden_dropout_prob=0.1,
    )
    return transformers.AlbertForMaskedLM(config)


class Normed(nn.Module):
    """BatchNorm: buffers that training changes, micro-batch by micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True)) for _ in range(3)
        )
        self.head = nn.Linear(16, 61)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), labels.flatten())


class Plain(nn.Module):
    """Few matrix products: on a CPU without bf16 instructions PyTorch takes milliseconds for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))])
        self.head = nn.Linear(16, 61)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers[0](self.embed(input_ids))
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()


def engine(
    make: Callable[[], nn.Module],
    config: OptimizerConfig,
    *,
    bf16: bool = False,
    pool: CsxPool | None = None,
    n: int = 1,
) -> tuple[Streamed, Callable[[], None]]:
    """A trainer on `n` workers of the pool, or on this process; and what closes it."""
    torch.manual_seed(0)
    module = make()
    dtype = {"dtype": torch.bfloat16} if bf16 else {}
    graph = capture(module.train(), (), text(0)[0], **dtype)
    optimizer, wire = make_optimizer(config), "bf16" if bf16 else "fp32"
    tier = DramTier() if pool is None else SharedTier(pool.weights)
    store = Store(graph, optimizer, {spec.key: tier for spec in fields(graph, optimizer, wire)}, wire)
    fill(store, initialise(module, graph.weights, 0))
    buffers = dict(initialise(module, [name for name in graph.buffers if name not in graph.constants], 0))

    def schedule(step: int) -> float:
        return 1.0 / (1 + step / 10)

    if pool is None:
        return Streamed(graph, store, buffers, config, schedule, seed=3), lambda: None
    link = SwarmLink(store)
    local = LocalSwarm(pool, graph, store, link.updater.wait, seed=3, num_csx=n)
    swarm = Swarm(graph, local.hub, local.share_eval_graph)

    def close() -> None:
        local.close()
        link.close()

    return Streamed(graph, store, buffers, config, schedule, seed=3, link=link, swarm=swarm), close


CASES = {
    "two": (gpt, CLIPPED, False, 2),
    "three": (gpt, CLIPPED, False, 3),
    "four": (gpt, CLIPPED, False, 4),
    # PyTorch turns off mkldnn in a process in which a bf16 product failed for lack of instructions, so all take part.
    "bf16": (Plain, CLIPPED, True, 4),
    "shared block": (albert, IMMEDIATE, False, 4),
    "batch norm": (Normed, IMMEDIATE, False, 3),
    "adafactor": (gpt, Adafactor(lr=1e-2), False, 2),
}


@functools.cache
def alone(
    make: Callable[[], nn.Module], config: OptimizerConfig, bf16: bool
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What each step of one worker reports, and what it ends with."""
    one, _ = engine(make, config, bf16=bf16)
    results = [repr(one.step(text(step))) for step in range(STEPS)]
    return results, {name: tensor.clone() for name, tensor in one.tensors()}


@pytest.mark.parametrize("case", CASES)
def test_thirty_steps_are_those_of_one_worker_to_the_bit(case: str, pool: CsxPool) -> None:
    make, config, bf16, n = CASES[case]
    results, expected = alone(make, config, bf16)
    many, close = engine(make, config, bf16=bf16, pool=pool, n=n)
    try:
        for step in range(STEPS):
            assert repr(many.step(text(step))) == results[step], step
        found = {name: tensor.clone() for name, tensor in many.tensors()}
    finally:
        close()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
