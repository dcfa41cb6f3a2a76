"""Streamed training equals the reference, bit for bit, whatever the model and the optimizer do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from openwafer.graph import capture
from openwafer.graph.deferred import initialise
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.reference import Reference, State
from openwafer.train.streamed import Streamed, fill

STEPS = 50
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 61, "max_position_embeddings": 16}


def text(step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    batches = []
    for index in range(3):
        ids = torch.randint(0, 61, (2, 16), generator=generator)
        labels = (ids * 5 + 3) % 61
        labels[0, : index * 3] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def gpt() -> nn.Module:
    """Tied embedding, dropout."""
    return build(ModelConfig(**TINY, dropout=0.1))


def llama() -> nn.Module:
    return build(ModelConfig(family="llama", **TINY, num_kv_heads=2))


def albert() -> nn.Module:
    """One block whose weights serve every layer, and a `transformers` model."""
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


def frozen() -> nn.Module:
    module = gpt()
    module.get_parameter("transformer.h.0.mlp.c_fc.weight").requires_grad_(False)
    module.get_parameter("transformer.wpe.weight").requires_grad_(False)
    return module


class Normed(nn.Module):
    """BatchNorm: buffers that training changes."""

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


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[dict[str, Any]]]]] = {
    "gpt": (gpt, text),
    "llama": (llama, text),
    "albert": (albert, text),
    "frozen": (frozen, text),
    "normed": (Normed, text),
}


def both(module: nn.Module, batch: dict[str, Any], config: OptimizerConfig) -> tuple[Reference, Streamed]:
    graph = capture(module.train(), (), batch)
    buffers = [name for name in graph.buffers if name not in graph.constants]
    state = State(
        weights={n: t.clone() for n, t in initialise(module, graph.weights, 0)},
        buffers={n: t.clone() for n, t in initialise(module, buffers, 0)},
    )
    optimizer = make_optimizer(config)
    dram = DramTier()
    store = Store(graph, optimizer, {spec.key: dram for spec in fields(graph, optimizer)})
    fill(store, initialise(module, graph.weights, 0))

    def schedule(step: int) -> float:
        return 1.0 / (1 + step / 10)

    reference = Reference(graph=graph, state=state, config=config, schedule=schedule, seed=3)
    streamed = Streamed(graph, store, dict(initialise(module, buffers, 0)), config, schedule, seed=3)
    return reference, streamed


def assert_equal(reference: Reference, streamed: Streamed) -> None:
    expected = dict(reference.tensors())
    found = {name: tensor.clone() for name, tensor in streamed.tensors()}
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["immediate", "clipped"])
@pytest.mark.parametrize("model", MODELS)
def test_fifty_steps_are_the_same_to_the_bit(model: str, max_grad_norm: float | None) -> None:
    make, batches = MODELS[model]
    torch.manual_seed(0)
    config = OptimizerConfig(lr=1e-2, max_grad_norm=max_grad_norm)
    reference, streamed = both(make(), batches(0)[0], config)
    before = {name: tensor.clone() for name, tensor in reference.state.weights.items()}
    norms = []
    for step in range(STEPS):
        expected, found = reference.step(batches(step)), streamed.step(batches(step))
        assert found == expected, step
        norms.append(expected.grad_norm)
    assert_equal(reference, streamed)
    assert any(not torch.equal(before[name], tensor) for name, tensor in reference.state.weights.items())
    if max_grad_norm:
        assert max(norms) > max_grad_norm, "clipping must have happened"
