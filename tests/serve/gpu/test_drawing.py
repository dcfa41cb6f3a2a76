"""Tokens drawn for many rows at once are those that the host draws row by row."""

import numpy as np
import pytest
import torch

from openwafer.serve.core import Sampling
from openwafer.serve.gpu.drawing import draw_rows, scratch_bytes
from openwafer.serve.runner import Draw
from openwafer.serve.sampler import draw, uniform
from tests.serve.gpu.held_memory import HeldMemory

KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1e-9, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 3.0, "min_p": 0.001, "top_p": 0.7},
)


@pytest.mark.parametrize("num_likely", [4, 64, 300])
def test_rows_of_all_kinds(num_likely: int) -> None:
    """With likely tokens that are never, mostly and always enough."""
    rng = np.random.default_rng(0)
    samplings = [Sampling(max_tokens=1, **kind) for kind in KINDS] * 25
    logits = rng.normal(0, 3, (len(samplings), 300)).astype(np.float32)
    logits[:, 7] = logits[:, 11] = logits.max(1)  # equal ones are ordered by id
    draws = [
        Draw(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, uniform=uniform(row, 4))
        for row, s in enumerate(samplings)
    ]
    expected = [draw(values, s, row, 4, {}) for row, (values, s) in enumerate(zip(logits, samplings, strict=True))]
    assert draw_rows(torch.from_numpy(logits), draws, num_likely).tolist() == expected
    assert len(set(expected)) > 20


def test_equal_weights_beyond_the_likely_ones_are_found() -> None:
    """Forty equal tokens, of which topk may return any eight: the host takes them by their ids."""
    logits = np.full((20, 100), -50, np.float32)
    logits[:, 30:70] = 1
    samplings = [Sampling(max_tokens=1, temperature=1.0, top_p=0.5)] * len(logits)
    draws = [Draw(temperature=1.0, top_k=None, top_p=0.5, min_p=0.0, uniform=uniform(row, 0)) for row in range(20)]
    expected = [draw(values, s, row, 0, {}) for row, (values, s) in enumerate(zip(logits, samplings, strict=True))]
    assert draw_rows(torch.from_numpy(logits), draws, 8).tolist() == expected


@pytest.mark.parametrize("num_rows", [8, 200])
@pytest.mark.parametrize("kind", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_drawing_holds_no_more_than_is_planned_for(num_rows: int, kind: dict) -> None:
    """All are about as likely as the others, so that limits need all of them sorted."""
    vocab = 3000
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 0.01, (num_rows, vocab)).astype(np.float32))
    draws = [
        Draw(**{"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "uniform": uniform(row, 0)} | kind)
        for row in range(num_rows)
    ]
    with HeldMemory().ignore(logits) as held:
        draw_rows(logits, draws)
    planned = scratch_bytes(num_rows, vocab)
    assert 0.15 * planned < held.peak_bytes <= planned
    if num_rows == 8 and ("top_p" in kind or "min_p" in kind):
        assert held.peak_bytes > 0.6 * planned  # a GPU's sort needs some of the rest
