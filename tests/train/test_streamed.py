"""Streamed training equals the reference, bit for bit, whatever the model and the optimizer do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from openwafer.errors import UserError
from openwafer.graph import capture
from openwafer.graph.deferred import initialise
from openwafer.memoryx.config import SGD, Adafactor, Adam, GroupConfig, Lion, OptimizerConfig
from openwafer.memoryx.groups import with_groups
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.engine import StepResult
from openwafer.train.reference import Reference, State
from openwafer.train.streamed import Streamed, fill

STEPS = 50
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 61, "max_position_embeddings": 16}


def text(step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    batches = []
    for index in range(2):
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
        num_hidden_layers=2,
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


def small() -> nn.Module:
    """What an optimizer can meet: a tied matrix, vectors, dropout, in one block."""
    return build(ModelConfig(**{**TINY, "num_hidden_layers": 1}, dropout=0.1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[dict[str, Any]]]]] = {
    "gpt": (gpt, text),
    "llama": (llama, text),
    "albert": (albert, text),
    "frozen": (frozen, text),
    "normed": (Normed, text),
}
SMALL = {"small": (small, text)}


def both(
    module: nn.Module, batch: dict[str, Any], config: OptimizerConfig, *, recompute: bool = True
) -> tuple[Reference, Streamed]:
    graph = with_groups(capture(module.train(), (), batch), config.groups)
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
    values = dict(initialise(module, buffers, 0))
    streamed = Streamed(graph, store, values, config, schedule, seed=3, recompute=recompute)
    return reference, streamed


def assert_equal(reference: Reference, streamed: Streamed) -> None:
    expected = dict(reference.tensors())
    found = {name: tensor.clone() for name, tensor in streamed.tensors()}
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def run_both(
    model: str, config: OptimizerConfig, steps: int = STEPS, *, recompute: bool = True
) -> tuple[Reference, list[StepResult]]:
    """Train with both, compare every result and in the end every bit."""
    make, batches = (MODELS | SMALL)[model]
    torch.manual_seed(0)
    reference, streamed = both(make(), batches(0)[0], config, recompute=recompute)
    before = {name: tensor.clone() for name, tensor in reference.state.weights.items()}
    results = []
    for step in range(steps):
        expected, found = reference.step(batches(step)), streamed.step(batches(step))
        assert repr(found) == repr(expected), step  # as text, in which a NaN equals itself
        results.append(expected)
    assert_equal(reference, streamed)
    assert any(not torch.equal(before[name], tensor) for name, tensor in reference.state.weights.items())
    return reference, results


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["immediate", "clipped"])
@pytest.mark.parametrize("model", MODELS)
def test_fifty_steps_are_the_same_to_the_bit(model: str, max_grad_norm: float | None) -> None:
    _, results = run_both(model, OptimizerConfig(lr=1e-2, max_grad_norm=max_grad_norm))
    if max_grad_norm:
        assert max(result.grad_norm for result in results) > max_grad_norm, "clipping must have happened"


@pytest.mark.parametrize("model", MODELS)
def test_kept_activations_change_no_bit(model: str) -> None:
    run_both(model, OptimizerConfig(lr=1e-2, max_grad_norm=0.5), steps=8, recompute=False)


def test_skipped_steps_with_kept_activations() -> None:
    torch.manual_seed(0)
    reference, streamed = both(Touchy(), touchy(0)[0], OptimizerConfig(lr=1e-2, nan="skip"), recompute=False)
    for step, x in enumerate([1.0, float("nan"), 1.0]):
        assert repr(reference.step(touchy(step, x=x))) == repr(streamed.step(touchy(step, x=x)))
    assert_equal(reference, streamed)


GROUPS = (
    GroupConfig(match="transformer.h.0.*.bias", frozen=True),
    GroupConfig(match=("*.ln_?.weight", "*.bias"), weight_decay=0.2),
    GroupConfig(match="transformer.wte.weight", lr_scale=0.1),
)
VARIANTS = {
    "sgd": SGD(lr=0.1, weight_decay=1e-3),
    "nesterov": SGD(lr=0.1, nesterov=True, max_grad_norm=0.5),
    "plain": SGD(lr=0.1, momentum=0.0),
    "adam": Adam(lr=1e-2, weight_decay=1e-3),
    "lion": Lion(lr=1e-3),
    "adafactor": Adafactor(lr=1e-2, weight_decay=1e-3),
    "bf16": OptimizerConfig(lr=1e-2, state_dtype="bf16"),
    "bf16_lion": Lion(lr=1e-3, state_dtype="bf16", max_grad_norm=0.5),
    "value": OptimizerConfig(lr=1e-2, max_grad_value=1e-2),
    "value_vetoable": OptimizerConfig(lr=1e-2, max_grad_value=1e-2, nan="skip"),
    "scaled": OptimizerConfig(lr=1e-2, loss_scale=1024.0),
    "dynamic": OptimizerConfig(lr=1e-2, loss_scale="dynamic", loss_scale_window=7, max_grad_norm=0.5),
    "groups": OptimizerConfig(lr=1e-2, groups=GROUPS),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_optimizer_is_the_same_to_the_bit(variant: str) -> None:
    reference, results = run_both("small", VARIANTS[variant])
    start, end = (sum(result.loss for result in part) / 10 for part in (results[:10], results[-10:]))
    assert end < start - 0.02, "it should learn something"
    if variant == "dynamic":
        assert reference.guard.scale == 2.0 ** (16 + STEPS // 7)


def test_adafactor_with_a_shared_block() -> None:
    run_both("albert", Adafactor(), steps=10)


@pytest.mark.parametrize("scale", [1024.0, "dynamic"])
def test_a_loss_scale_changes_no_bit(scale: Any) -> None:
    plain, _ = run_both("small", OptimizerConfig(lr=1e-2), steps=5)
    scaled, _ = run_both("small", OptimizerConfig(lr=1e-2, loss_scale=scale), steps=5)
    for name, tensor in plain.state.weights.items():
        assert torch.equal(scaled.state.weights[name], tensor), name


class Touchy(nn.Module):
    """Its gradient passes through a value of size `gain`, so a large gain times a large loss scale overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        small = self.norm(self.layer(x)) * 1e-30
        return (small * gain).square().mean()


def touchy(step: int, gain: float = 1e30, x: float = 1.0) -> list[dict[str, Any]]:
    noise = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
    return [{"x": part * x, "gain": torch.tensor(gain)} for part in noise]


def test_an_overflow_halves_the_scale_and_the_step_is_skipped() -> None:
    class Steep(Touchy):
        def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
            return (self.norm(self.layer(x)) * 1e-30 * gain).mean()

    torch.manual_seed(0)
    config = OptimizerConfig(lr=1e-2, loss_scale="dynamic", loss_scale_window=4)
    reference, streamed = both(Steep(), touchy(0)[0], config)
    for step in range(3):
        assert repr(reference.step(touchy(step))) == repr(streamed.step(touchy(step)))
    before = {name: tensor.clone() for name, tensor in reference.tensors()}
    skipped = 0
    while True:  # d loss / d small is 1e36 / 32 times the scale
        expected, found = reference.step(touchy(3, 1e36)), streamed.step(touchy(3, 1e36))
        assert repr(expected) == repr(found)
        assert_equal(reference, streamed)
        if not expected.skipped:
            break
        skipped += 1
        assert reference.guard.scale == 2.0 ** (16 - skipped)
        for name, tensor in reference.tensors():
            assert name == "guard/state" or torch.equal(tensor, before[name]), name
    assert 1 <= skipped <= 5
    assert reference.guard.num_skipped == skipped
    for step in range(4, 8):
        assert repr(reference.step(touchy(step))) == repr(streamed.step(touchy(step)))
    assert reference.guard.scale == 2.0 ** (16 - skipped + 1), "four good steps double it"
    assert_equal(reference, streamed)


def test_a_nan_is_skipped_whole_or_stops_with_the_unit() -> None:
    torch.manual_seed(0)
    reference, streamed = both(Touchy(), touchy(0)[0], OptimizerConfig(lr=1e-2, nan="skip"))
    plain, _ = both(Touchy(), touchy(0)[0], OptimizerConfig(lr=1e-2))
    plain.state = State(
        weights={name: tensor.clone() for name, tensor in reference.state.weights.items()},
        buffers={name: tensor.clone() for name, tensor in reference.state.buffers.items()},
        optimizer=plain.state.optimizer,
    )
    for step, x in enumerate([1.0, float("nan"), 1.0, float("inf"), 1.0]):
        expected, found = reference.step(touchy(step, x=x)), streamed.step(touchy(step, x=x))
        assert repr(expected) == repr(found)
        assert expected.skipped == (x != 1.0)
        assert_equal(reference, streamed)
        plain.schedule = lambda done, step=step: 1.0 / (1 + step / 10)
        if x == 1.0:
            plain.step(touchy(step))
    for name, tensor in plain.state.weights.items():  # as if the bad batches had never been, but for the rate
        assert torch.equal(reference.state.weights[name], tensor), name
    _, stops = both(Touchy(), touchy(0)[0], OptimizerConfig(lr=1e-2))
    with pytest.raises(UserError, match=r"step 1: the loss is nan, and Unit '.*' is the first .* nothing was changed"):
        stops.step(touchy(0, x=float("nan")))


def test_an_infinite_loss_with_finite_gradients_is_skipped_too() -> None:
    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
            return self.layer(x).mean() + gain  # the gradient knows nothing of the gain

    reference, streamed = both(Capped(), touchy(0)[0], OptimizerConfig(nan="skip"))
    for gain in (1.0, float("inf"), 1.0):
        expected, found = reference.step(touchy(0, gain)), streamed.step(touchy(0, gain))
        assert repr(expected) == repr(found)
        assert expected.skipped == (gain != 1.0)
    assert_equal(reference, streamed)


def test_a_run_that_only_skips_stops() -> None:
    _, streamed = both(Touchy(), touchy(0)[0], OptimizerConfig(nan="skip"))
    for _ in range(100):
        streamed.step(touchy(0, x=float("nan")))
    with pytest.raises(UserError, match="the 101th step in a row that had to be skipped"):
        streamed.step(touchy(0, x=float("nan")))


def test_frozen_groups_have_no_state() -> None:
    reference, streamed = both(gpt(), text(0)[0], OptimizerConfig(groups=GROUPS))
    names = {name for name, _ in streamed.tensors()}
    assert "optimizer/m/transformer.h.1.mlp.c_fc.bias" in names
    assert "optimizer/m/transformer.h.0.mlp.c_fc.bias" not in names
    before = reference.state.weights["transformer.h.0.mlp.c_fc.bias"].clone()
    reference.step(text(0))
    assert torch.equal(reference.state.weights["transformer.h.0.mlp.c_fc.bias"], before)
