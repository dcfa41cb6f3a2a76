"""Guessed updates: right ones are taken over, wrong ones leave no trace, and the bits are those of plain updates."""

import dataclasses

import pytest
import torch

from openwafer.graph import Graph, capture
from openwafer.memoryx.config import GroupConfig, OptimizerConfig
from openwafer.memoryx.groups import with_groups
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.speculation import Speculation, can_speculate
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.memoryx.update import Arrival, UpdateNumbers, Updater
from openwafer.models.build import build
from openwafer.models.config import ModelConfig

NUMBERS = UpdateNumbers(lr=1e-2, step=1, divisor=4.0)
CLIPPED = dataclasses.replace(NUMBERS, factor=0.5)


def make(kind: str = "adamw", groups: tuple[GroupConfig, ...] = ()) -> tuple[Graph, Store]:
    torch.manual_seed(0)
    module = build(
        ModelConfig(hidden_size=32, num_hidden_layers=3, num_heads=2, vocab_size=50, max_position_embeddings=8)
    )
    ids = torch.zeros(1, 8, dtype=torch.int64)
    graph = with_groups(capture(module, (), {"input_ids": ids, "labels": ids.clone()}, dtype=torch.bfloat16), groups)
    optimizer = make_optimizer(OptimizerConfig(kind=kind, groups=groups))  # pyright: ignore[reportArgumentType]
    tier = DramTier()
    store = Store(graph, optimizer, {spec.key: tier for spec in fields(graph, optimizer, "bf16")}, "bf16")
    store.write_all((name, "wire", module.get_parameter(name).detach()) for name in graph.weights)
    return graph, store


def state(store: Store) -> dict[tuple[str, str], torch.Tensor]:
    return {(name, field): value.clone() for name, field, value in store.read_all()}


def gradients(graph: Graph, seed: int) -> dict[int, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        unit.index: {
            weight.name: torch.randn(weight.spec.shape, generator=generator).bfloat16()
            for weight in graph.owned(unit)
            if weight.requires_grad
        }
        for unit in graph.units
    }


def steps(store: Store, updater: Updater, verdicts: list[UpdateNumbers | None]) -> None:
    """Guesses for all Units, as backward would, then what `verdicts` says of each step."""
    for number, verdict in enumerate(verdicts, start=1):
        arrivals = []
        likely = dataclasses.replace(NUMBERS, step=number)
        for index, of_unit in reversed(gradients(store.graph, number).items()):
            unit = store.graph.units[index]
            arrivals.append(Arrival(unit, of_unit, lambda: True, lambda: None, lambda: None))
            updater.guess(arrivals[-1], likely)
        for arrival in reversed(arrivals):
            if verdict is None:
                updater.discard(arrival)
            else:
                updater.post(arrival, dataclasses.replace(verdict, step=number))
        updater.drain()


@pytest.mark.parametrize(
    "verdicts", [[NUMBERS] * 3, [CLIPPED] * 3, [NUMBERS, CLIPPED, None, NUMBERS]], ids=["right", "wrong", "mixed"]
)
@pytest.mark.parametrize(
    "groups", [(), (GroupConfig(match="*.bias", lr_scale=0.1), GroupConfig(match="*wte*", frozen=True))]
)
def test_the_bits_are_those_of_plain_updates(
    verdicts: list[UpdateNumbers | None], groups: tuple[GroupConfig, ...]
) -> None:
    _, plain = make(groups=groups)
    updater = Updater(plain.update)
    steps(plain, updater, verdicts)
    updater.close()

    _, guessed = make(groups=groups)
    speculation = Speculation(guessed)
    updater = Updater(guessed.update, speculation)
    steps(guessed, updater, verdicts)
    updater.close()
    for key, value in state(plain).items():
        assert torch.equal(state(guessed)[key], value), key
    assert speculation.num_bytes <= 9.5 * guessed.graph.num_parameters


def test_guesses_are_taken_and_dropped() -> None:
    _, store = make()
    speculation = Speculation(store)
    unit = store.graph.units[1]
    before = state(store)
    guess = speculation.update(unit, gradients(store.graph, 1)[1], NUMBERS)
    assert all(torch.equal(value, before[key]) for key, value in state(store).items())  # nothing is changed
    assert speculation.commit(guess)
    assert any(not torch.equal(value, before[key]) for key, value in state(store).items())
    used = speculation.num_bytes
    speculation.drop(speculation.update(unit, gradients(store.graph, 2)[1], NUMBERS))
    assert speculation.num_bytes == used  # the old arrays were the spare


def test_a_guess_that_is_not_finite_is_never_taken() -> None:
    _, store = make()
    speculation = Speculation(store)
    bad = {name: gradient * float("inf") for name, gradient in gradients(store.graph, 1)[1].items()}
    before = state(store)
    assert not speculation.commit(speculation.update(store.graph.units[1], bad, NUMBERS))
    assert all(torch.equal(value, before[key]) for key, value in state(store).items())


def test_only_what_can_go_elsewhere_is_guessed() -> None:
    assert can_speculate(make()[1])
    assert not can_speculate(make("lion")[1])
