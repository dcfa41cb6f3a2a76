"""Workers with devices of their own: real processes, and devices of host memory whose copies come late."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from late_device import FREE_BYTES, TOTAL_BYTES, LateDevices
from torch import Tensor

from openwafer.errors import UserError
from openwafer.graph import Graph, capture
from openwafer.graph.deferred import deferred
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.swarmx.config import SwarmConfig
from openwafer.train.assembly import Assembly, Plan
from openwafer.train.gpu_workers import GpuWorkers

CONFIG = ModelConfig(
    hidden_size=32, num_hidden_layers=2, num_heads=4, vocab_size=61, max_position_embeddings=16, dropout=0.1
)
STEPS = 6


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def workers() -> Iterator[GpuWorkers]:
    """Two on one device, for one run after the other."""
    made = GpuWorkers(2, SwarmConfig(), None, num_gpus=1, device=LateDevices())
    yield made
    made.close()


def text(step: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 61, (5, 2, 16), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": part, "labels": (part * 5 + 3) % 61} for part in ids]


def plan(memory: MemoryConfig) -> tuple[Plan, Graph]:
    with deferred():
        module = build(CONFIG)
    evaluated = capture(module.eval(), (), text(0)[0])
    graph = capture(module.train(), (), text(0)[0])
    config = OptimizerConfig(lr=1e-2, max_grad_norm=0.5)
    made = Plan(
        graph=graph, module=module, optimizer=config, schedule=lambda step: 1.0, memory=memory, precision="fp32", seed=3
    )
    return made, evaluated


def trained(memory: MemoryConfig, workers: GpuWorkers | None) -> tuple[list[str], float, dict[str, Tensor]]:
    """What each step reports, the loss in eval mode, and what the run ends with."""
    made, evaluated = plan(memory)
    assembly = Assembly(made, workers)
    try:
        results = [repr(assembly.engine.step(text(step))) for step in range(STEPS)]
        loss = assembly.engine.evaluate(text(99), evaluated)
        return results, loss, {name: tensor.clone() for name, tensor in assembly.engine.tensors()}
    finally:
        if workers is not None:
            workers.detach()
        assembly.close()


@pytest.mark.parametrize("where", ["memory", "flash"])
def test_the_bits_are_those_of_one_worker(where: str, tmp_path: Path, workers: GpuWorkers) -> None:
    """Five micro-batches on two workers; tied embedding, dropout, clipping; weights in memory or on flash."""
    memory = MemoryConfig() if where == "memory" else MemoryConfig(dram=200_000, flash=tmp_path)
    results, loss, expected = trained(MemoryConfig(), None)
    found_results, found_loss, found = trained(memory, workers)
    assert found_results == results
    assert found_loss == loss
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_workers_share_device_memory_and_the_micro_batch_fits_their_part(workers: GpuWorkers) -> None:
    assert workers.budget.limit == int(0.92 * FREE_BYTES) // 2
    assert workers.budget.context == (TOTAL_BYTES - FREE_BYTES) // 2
    with deferred():
        module = build(CONFIG).train()

    def make_graph(size: int) -> Graph:
        ids = torch.zeros(size, 16, dtype=torch.int64)
        return capture(module, (), {"input_ids": ids, "labels": ids})

    assert workers.fit(make_graph, 12, None) == 6, "one micro-batch for each"
    before, workers.budget.limit = workers.budget.limit, 1000
    with pytest.raises(UserError, match=r"a step needs .* of device memory"):
        workers.check(make_graph(6), 2)
    workers.budget.limit = before


def test_without_a_gpu_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="device cuda: PyTorch sees no GPU here"):
        GpuWorkers(2, SwarmConfig(), None)
