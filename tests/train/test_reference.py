"""The reference trainer against ordinary autograd and torch.optim, and its own rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from openwafer.errors import UserError
from openwafer.graph import capture
from openwafer.graph.deferred import deferred, initialise
from openwafer.memoryx.config import OptimizerConfig
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.reference import Reference, State

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 61, "max_position_embeddings": 16}
STEPS = 12


def micro_batches(step: int, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Text-like: the next token is a function of this one; some labels are ignored, unevenly."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for index in range(count):
        ids = torch.randint(0, 61, (2, 16), generator=generator)
        labels = (ids * 5 + 3) % 61
        labels[0, : index * 3] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def reference(module: nn.Module, optimizer: OptimizerConfig, batch: dict[str, Any], seed: int = 0) -> Reference:
    graph = capture(module, (), batch)
    state = State(
        weights={n: t.clone() for n, t in initialise(module, graph.weights, seed)},
        buffers={n: t.clone() for n, t in initialise(module, graph.buffers, seed)},
    )
    return Reference(graph=graph, state=state, config=optimizer, schedule=lambda step: 1.0 / (1 + step), seed=seed)


def ordinary_steps(module: nn.Module, config: OptimizerConfig, loss_of: Callable[[list], torch.Tensor]) -> list[float]:
    """The same training with autograd over the whole module and torch.optim."""
    groups = [
        {"params": [p for p in module.parameters() if p.requires_grad and p.dim() >= 2]},
        {"params": [p for p in module.parameters() if p.requires_grad and p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
    )
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = config.lr / (1 + step)
        optimizer.zero_grad()
        loss = loss_of(micro_batches(step))
        loss.backward()
        if config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), config.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_it_is_ordinary_training(family: str, max_grad_norm: float | None) -> None:
    torch.manual_seed(0)
    module = build(ModelConfig(family=family, **TINY)).train()  # pyright: ignore
    config = OptimizerConfig(lr=1e-2, max_grad_norm=max_grad_norm)
    trainer = reference(module, config, micro_batches(0)[0])
    ours = [trainer.step(micro_batches(step)).loss for step in range(STEPS)]

    def loss_of(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        sums, counts = zip(*(module(**batch) for batch in batches), strict=True)
        return torch.stack(sums).sum() / sum(counts)

    theirs = ordinary_steps(module, config, loss_of)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[0] - 0.2, "it should learn something"
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(trainer.state.weights[name], parameter.detach(), rtol=2e-3, atol=2e-4)


def test_a_transformers_model_with_a_mean_loss() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    module = transformers.GPT2LMHeadModel(config).train()
    optimizer = OptimizerConfig(lr=1e-2)
    trainer = reference(module, optimizer, {**micro_batches(0)[0], "use_cache": False})
    ours = [
        trainer.step([{**batch, "use_cache": False} for batch in micro_batches(step)]).loss for step in range(STEPS)
    ]
    theirs = ordinary_steps(
        module, optimizer, lambda batches: torch.stack([module(**batch).loss for batch in batches]).mean()
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_gradient_laid_out_otherwise_than_its_weight() -> None:
    """Autograd gives the gradient of `weight.t().contiguous()` as a transposed view."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(61, 8)
            self.weight = nn.Parameter(torch.randn(61, 8))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.embed(input_ids) @ (2 * self.weight.t().contiguous())
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    module = Transposed()
    config = OptimizerConfig(lr=0.1)
    trainer = reference(module, config, micro_batches(0)[0])
    losses = [trainer.step(micro_batches(step)).loss for step in range(STEPS)]
    expected = ordinary_steps(
        module, config, lambda batches: torch.stack([module(**batch) for batch in batches]).mean()
    )
    assert losses == pytest.approx(expected, rel=1e-4)


def test_frozen_weights_stay() -> None:
    module = build(ModelConfig(**TINY))
    module.get_parameter("transformer.h.0.attn.c_attn.weight").requires_grad_(False)
    trainer = reference(module, OptimizerConfig(lr=1e-2), micro_batches(0)[0])
    before = {name: tensor.clone() for name, tensor in trainer.state.weights.items()}
    trainer.step(micro_batches(0))
    changed = {name for name, tensor in trainer.state.weights.items() if not torch.equal(tensor, before[name])}
    assert changed == set(before) - {"transformer.h.0.attn.c_attn.weight"}


def test_dropout_depends_on_seed_step_and_micro_batch_only() -> None:
    with deferred():
        module = build(ModelConfig(**TINY, dropout=0.3)).train()
    batch = micro_batches(0, count=1) * 2

    def losses(seed: int, noise: int) -> list[float]:
        torch.manual_seed(noise)
        trainer = reference(module, OptimizerConfig(lr=0.0), batch[0], seed=seed)
        trainer.state.weights = {n: t.clone() for n, t in initialise(module, trainer.graph.weights, 0)}
        return [trainer.step(batch).loss for _ in range(3)]

    assert losses(seed=1, noise=1) == losses(seed=1, noise=2)
    assert losses(seed=1, noise=1) != losses(seed=2, noise=1)
    assert len(set(losses(seed=1, noise=1))) == 3, "each step drops other elements"
    trainer = reference(module, OptimizerConfig(lr=0.0), batch[0])
    state = torch.get_rng_state()
    trainer.step(batch)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state is its own"


def test_batch_norm_statistics_follow_the_micro_batches() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    torch.manual_seed(0)
    module = Net().train()
    batches = [{"x": torch.randn(6, 4) + k} for k in range(3)]
    trainer = reference(module, OptimizerConfig(lr=0.0), batches[0])
    trainer.step(batches)
    for batch in batches:
        module(**batch)
    for name, buffer in module.named_buffers():
        assert torch.equal(trainer.state.buffers[name], buffer), name


def test_a_nan_changes_nothing_and_names_the_unit() -> None:
    module = build(ModelConfig(**TINY))
    trainer = reference(module, OptimizerConfig(lr=1e-2), micro_batches(0)[0])
    trainer.step(micro_batches(0))
    trainer.state.weights["transformer.h.1.mlp.c_fc.bias"][3] = float("nan")
    before = {name: tensor.clone() for name, tensor in trainer.state.weights.items()}
    with pytest.raises(UserError, match=r"step 2: the gradient of '.*' \(Unit '.*'\) is not finite"):
        trainer.step(micro_batches(1))
    assert trainer.state.step == 1
    for name, tensor in trainer.state.weights.items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num())


def test_a_batch_without_labels_and_a_model_without_loss() -> None:
    module = build(ModelConfig(**TINY))
    trainer = reference(module, OptimizerConfig(), micro_batches(0)[0])
    empty = {"input_ids": micro_batches(0)[0]["input_ids"], "labels": torch.full((2, 16), -100)}
    with pytest.raises(UserError, match="no label to learn from"):
        trainer.step([empty])
    with pytest.raises(UserError, match="returns no loss"):
        reference(nn.Linear(3, 3), OptimizerConfig(), {"input": torch.zeros(2, 3)})
