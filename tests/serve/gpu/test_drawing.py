"""Tokens drawn for many rows at once are those that the host draws row by row."""

import numpy as np
import torch

from openwafer.serve.core import Sampling
from openwafer.serve.gpu.drawing import draw_rows
from openwafer.serve.runner import Draw
from openwafer.serve.sampler import draw, uniform

KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1e-9, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 1000},
)


def test_rows_of_all_kinds() -> None:
    rng = np.random.default_rng(0)
    samplings = [Sampling(max_tokens=1, **kind) for kind in KINDS] * 25
    logits = rng.normal(0, 3, (len(samplings), 300)).astype(np.float32)
    logits[:, 7] = logits[:, 11] = logits.max(1)  # equal ones are ordered by id
    draws = [
        Draw(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, uniform=uniform(row, 4))
        for row, s in enumerate(samplings)
    ]
    expected = [draw(values, s, row, 4, {}) for row, (values, s) in enumerate(zip(logits, samplings, strict=True))]
    assert draw_rows(torch.from_numpy(logits), draws).tolist() == expected
    assert len(set(expected)) > 20
