"""Generation with the key/value cache gives what the full forward gives."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.config import parse
from openwafer.errors import UserError
from openwafer.models.build import build
from openwafer.models.cache import KVCache
from openwafer.models.config import ModelConfig

SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_heads": 4, "vocab_size": 40}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "max_position_embeddings": 24},
    "llama": {"family": "llama", "num_kv_heads": 2},
    "mistral": {"family": "llama", "num_kv_heads": 2, "sliding_window": 5},
    "gemma": {
        "family": "llama",
        "num_kv_heads": 1,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "rope_local_theta": 10.0,
        "gemma_norms": True,
        "qk_norm": True,
    },
}


def model(kind: str) -> tuple[ModelConfig, torch.nn.Module]:
    config = parse(ModelConfig, {**SIZES, **KINDS[kind]})
    torch.manual_seed(0)
    module = build(config).eval()
    for parameter in module.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return config, module


MODELS = {kind: model(kind) for kind in KINDS}


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    pieces=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_any_split_into_pieces_equals_the_full_forward(kind: str, pieces: list[int], seed: int):
    config, module = MODELS[kind]
    total = min(sum(pieces), 24)
    ids = torch.randint(0, 40, (2, total), generator=torch.Generator().manual_seed(seed))
    cache = KVCache(config, batch=2, max_tokens=24)
    logits = []
    for piece in pieces:
        part = ids[:, cache.length : cache.length + piece]
        if part.shape[1]:
            logits.append(module(part, cache=cache))
    assert cache.length == total
    torch.testing.assert_close(torch.cat(logits, dim=1), module(ids), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_lowering_the_length_forgets():
    config, module = MODELS["llama"]
    cache = KVCache(config, batch=1, max_tokens=8)
    first = module(torch.tensor([[1, 2, 3]]), cache=cache)
    module(torch.tensor([[9, 9]]), cache=cache)
    cache.length = 2
    assert torch.allclose(module(torch.tensor([[3]]), cache=cache)[:, -1], first[:, -1], atol=1e-6)


def test_a_full_cache_says_so_and_stays_as_it_was():
    config, module = MODELS["llama"]
    cache = KVCache(config, batch=1, max_tokens=4)
    module(torch.tensor([[1, 2, 3]]), cache=cache)
    with pytest.raises(UserError, match="2 more tokens do not fit: the cache holds 3 of at most 4"):
        module(torch.tensor([[1, 2]]), cache=cache)
    assert cache.length == 3
