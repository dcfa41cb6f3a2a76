"""Tokens drawn on the device, many rows at once: `sampler.draw` for rows that nothing is added to or forbidden in.

The same random number gives the same token as on the host, up to the rounding of the exponential.
"""

from collections.abc import Sequence

import torch

from openwafer.serve.runner import Draw


def draw_rows(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """One token id (int64) for each row of fp32 logits [n, vocab]."""
    tokens = logits.argmax(dim=1)
    limited, free = [], []
    for row, draw in enumerate(draws):
        if draw.temperature > 0:
            (limited if _is_limited(draw, logits.shape[1]) else free).append(row)
    for rows, drawn in ((free, _free), (limited, _limited)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = drawn(logits[index], [draws[row] for row in rows])
    return tokens


def _is_limited(draw: Draw, vocab_size: int) -> bool:
    return draw.top_p < 1 or draw.min_p > 0 or (draw.top_k is not None and 0 < draw.top_k < vocab_size)


def _free(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return _pick(_weights(logits, draws), draws)


def _limited(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """min_p, top_k and top_p, in this order, on the likeliest first (equal ones by id)."""
    vocab = logits.shape[1]
    weights, ids = _weights(logits, draws).sort(dim=1, descending=True, stable=True)
    weights = weights.double()
    top_ks = [draw.top_k if draw.top_k is not None and 0 < draw.top_k < vocab else vocab for draw in draws]
    min_p = _column([draw.min_p for draw in draws], weights)
    top_p = _column([draw.top_p for draw in draws], weights)
    places = torch.arange(vocab, device=logits.device)
    # The likeliest has weight 1 and always stays.
    is_in = (weights >= min_p) & (places < torch.tensor(top_ks, device=logits.device)[:, None])
    is_in[:, 0] = True
    weights = torch.where(is_in, weights, 0)
    before = weights.cumsum(dim=1) - weights
    is_in = (before < top_p * weights.sum(dim=1, keepdim=True)) | (top_p >= 1)
    is_in[:, 0] = True
    chosen = _pick(torch.where(is_in, weights, 0), draws)
    return ids.gather(1, chosen[:, None])[:, 0]


def _weights(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """exp of the scaled logits; the maximum goes first, so that a tiny temperature gives zeros, not infinities."""
    temperatures = _column([max(draw.temperature, 1e-6) for draw in draws], logits)
    return ((logits - logits.amax(dim=1, keepdim=True)) / temperatures).exp()


def _pick(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The place in each row of weights [n, m] where the cumulated weight passes the row's random number."""
    cumulated = weights.cumsum(dim=1, dtype=torch.float64)
    wanted = _column([draw.uniform for draw in draws], cumulated) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, wanted, right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def _column(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]
