"""What is special to GPT: dropout, the limit of positions, capture."""

import pytest
import torch

from openwafer.errors import UserError
from openwafer.models.config import ModelConfig
from openwafer.models.gpt import GPT


def config(**options: float) -> ModelConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_heads": 2, "vocab_size": 40}
    return ModelConfig(**{**sizes, "max_position_embeddings": 12, **options})  # pyright: ignore


IDS = torch.arange(24).view(2, 12)


def test_too_many_tokens_are_refused():
    with pytest.raises(UserError, match="13 tokens exceed the 12 positions"):
        GPT(config())(torch.zeros(1, 13, dtype=torch.int64))


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    module = GPT(config(dropout=0.5))
    assert not torch.equal(module(IDS), module(IDS))
    module.eval()
    assert torch.equal(module(IDS), module(IDS))


def test_dropout_is_on_embedding_attention_and_both_branches():
    with torch.device("meta"):
        module = GPT(config(dropout=0.5))
    graph = torch.export.export(module, (IDS.to("meta"),), strict=False).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert sum("dropout" in str(node.target) for node in calls) == 1 + 2 * 3
    attention = [node for node in calls if "scaled_dot_product" in str(node.target)]
    assert len(attention) == 3
    assert all(0.5 in node.args or 0.5 in node.kwargs.values() for node in attention)


def test_ignored_labels_count_nothing():
    module = GPT(config())
    loss_sum, count = module(IDS, torch.full_like(IDS, -100))
    assert (loss_sum.item(), count.item()) == (0.0, 0)


def test_a_tied_head_trains_the_embedding_and_an_untied_one_is_separate():
    tied = GPT(config())
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert not tied.lm_head.weight.is_meta
    untied = GPT(config(tie_word_embeddings=False))
    assert untied.lm_head.weight is not untied.transformer.wte.weight
    assert untied.lm_head.weight.detach().std().item() == pytest.approx(0.02, rel=0.2)


def test_it_learns():
    torch.manual_seed(0)
    module = GPT(config())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(45):
        loss_sum, count = module(IDS, IDS.roll(-1, 1))
        (loss_sum / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss_sum / count).item())
    assert losses[0] == pytest.approx(3.69, abs=0.1)  # ln 40: a fresh model knows nothing
    assert losses[-1] < 0.5


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("training", [True, False])
def test_export(device: str, training: bool):
    with torch.device(device):
        module = GPT(config(dropout=0.1)).train(training)
    ids = IDS.to(device)
    program = torch.export.export(module, (ids, ids), strict=False)
    assert len(program.graph_signature.user_outputs) == 2
    if device == "cpu" and not training:
        captured = program.module(check_guards=False)(ids, ids)
        assert all(torch.equal(*pair) for pair in zip(module(ids, ids), captured, strict=True))
