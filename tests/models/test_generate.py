"""The generation loop: the cache, stopping, sampling."""

import itertools

import pytest
import torch

from openwafer.errors import UserError
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.models.generate import generate, sample


@pytest.fixture(params=["gpt", "llama"])
def module(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    module = build(
        ModelConfig(
            family=request.param,
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=4,
            vocab_size=50,
            max_position_embeddings=24,
            dropout=0.5,
        )
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.4)
    return module


def _greedy_without_cache(module: torch.nn.Module, ids: list[int], num_tokens: int) -> list[int]:
    ids = list(ids)
    module.eval()
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-num_tokens:]


def test_greedy_with_cache_is_greedy_without(module):
    expected = _greedy_without_cache(module, [3, 1, 4], 12)
    assert len(set(expected)) > 1  # a loop of one token would prove little
    module.train()  # dropout must be off while generating, and on again after
    assert list(generate(module, [3, 1, 4], 12)) == expected
    assert module.training


def test_stops(module):
    tokens = list(generate(module, [3, 1, 4], 12))
    first = tokens.index(tokens[5])
    assert list(generate(module, [3, 1, 4], 12, stop_ids=[tokens[5]])) == tokens[:first]


def test_ends_with_the_context(module):
    assert len(list(generate(module, [1] * 20, 100))) == 4


def test_seed(module):
    draw = [list(generate(module, [1, 2], 15, temperature=1.5, seed=seed)) for seed in (7, 7, 8)]
    assert draw[0] == draw[1] != draw[2]


def test_a_tiny_top_p_or_temperature_is_greedy(module):
    greedy = list(generate(module, [1, 2], 10))
    assert list(generate(module, [1, 2], 10, temperature=2.0, top_p=1e-6)) == greedy
    assert list(generate(module, [1, 2], 10, temperature=1e-30)) == greedy


def test_grad_mode_does_not_leak(module):
    for _ in itertools.islice(generate(module, [1, 2], 10), 3):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()


def test_sample_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    generator = torch.Generator().manual_seed(0)

    def shares(top_p: float) -> torch.Tensor:
        drawn = [sample(probabilities.log(), 1.0, top_p, generator) for _ in range(2000)]
        return torch.bincount(torch.tensor(drawn), minlength=4) / 2000

    assert (shares(1.0) - probabilities).abs().max() < 0.05
    # 0.5 + 0.3 reach 0.7: the two others are never drawn.
    assert (shares(0.7) - torch.tensor([0.625, 0.375, 0, 0])).abs().max() < 0.05
    assert shares(0.7)[2:].sum() == 0


@pytest.mark.parametrize(
    ("ids", "options", "reason"),
    [
        ([], {}, "nothing to continue"),
        ([1] * 24, {}, "24 tokens and the model sees 24"),
        ([50], {}, "outside 0..49"),
        ([-1], {}, "outside 0..49"),
        ([1], {"max_tokens": 0}, "max_tokens 0"),
        ([1], {"temperature": -1.0}, "temperature -1"),
        ([1], {"top_p": 0.0}, "top_p 0.0"),
    ],
)
def test_bad_requests(module, ids, options, reason):
    with pytest.raises(UserError, match=reason):
        generate(module, ids, **{"max_tokens": 5} | options)


def test_damaged_weights(module):
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="not a number"):
        list(generate(module, [1], 3))
