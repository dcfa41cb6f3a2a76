"""The worker: what runs how often, with weights that are only there while they pass."""

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from openwafer.csx.worker import Worker
from openwafer.graph import Unit, capture
from openwafer.graph.unit import UnitFunction
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.timeline import Timeline

CONFIG = ModelConfig(
    hidden_size=32, num_hidden_layers=2, num_heads=4, vocab_size=61, max_position_embeddings=16, dropout=0.1
)


def batches(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 61, (count, 2, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": part, "labels": (part * 5 + 3) % 61} for part in ids]


class Passing:
    """Streams weights through one buffer that each Unit overwrites: there is nothing else to compute on."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.buffer = torch.full((60_000,), torch.nan)

    def __call__(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
        for unit in order:
            self.buffer.fill_(torch.nan)
            parts, start = {}, 0
            for name in unit.weights:
                value = self.weights[name]
                parts[name] = self.buffer[start : start + value.numel()].view(value.shape)
                parts[name].copy_(value)
                start += -(-value.numel() // 16) * 16
            yield unit, parts


def test_what_is_kept_is_not_computed_again_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = build(CONFIG).train()
    graph = capture(module, (), batches(1)[0])
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in graph.buffers}
    calls: Counter[int] = Counter()
    plain = UnitFunction.__call__

    def counted(function: UnitFunction, *args):
        calls[function.index] += 1
        return plain(function, *args)

    monkeypatch.setattr(UnitFunction, "__call__", counted)
    embed, block, head = (function.index for function in graph.functions)
    for count in (1, 3):
        found = {}
        for recompute in (True, False):
            calls.clear()
            worker = Worker(graph, 7, recompute=recompute)
            done = worker.forward(Passing(weights), batches(count), buffers, 0)
            gradients = {n: g for _, part in worker.backward(Passing(weights), done) for n, g in part.items()}
            assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
            found[recompute] = (done.loss, gradients)
            runs = 2 if recompute else 1
            # With one micro-batch the head's forward is followed by its backward: it is never computed again.
            head_runs = runs if count > 1 else 1
            assert calls == {embed: runs * count, block: runs * 2 * count, head: head_runs * count}
        (loss, expected), (kept_loss, kept) = found[True], found[False]
        assert kept_loss == loss
        assert expected.keys() == kept.keys() == set(weights)
        for name, gradient in expected.items():
            assert torch.equal(kept[name], gradient), name


def test_each_unit_has_a_span_in_both_directions() -> None:
    module = build(CONFIG).train()
    graph = capture(module, (), batches(1)[0])
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in graph.buffers}
    with Timeline() as timeline:
        worker = Worker(graph, 7)
        done = worker.forward(Passing(weights), batches(2), buffers, 0)
        for _ in worker.backward(Passing(weights), done):
            pass
        names = [span.name for span in timeline._spans if span.lane == "compute"]
    forward = [f"forward {unit.name}" for unit in graph.units]
    assert names == forward + [name.replace("forward", "backward") for name in reversed(forward)]
