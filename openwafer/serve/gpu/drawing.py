"""Tokens drawn on the device, many rows at once: `sampler.draw` for rows that nothing is added to or forbidden in.

The same random number gives the same token as on the host, up to the rounding of the exponential.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from openwafer.serve.gpu.sending import sent
from openwafer.serve.runner import Draw

NUM_LIKELY = 1024  # tokens that limits are tried on before all are sorted
# Rows that are drawn, and those of them that are sorted whole, at one time: so many make a GPU busy, and
# `scratch_bytes` stays small however many rows a step has (guesses make several of each request).
NUM_TOGETHER = 128
NUM_SORTED_TOGETHER = 32


def scratch_bytes(num_rows: int, vocab: int) -> int:
    """The most that `draw_rows` holds at one time besides its logits.

    Tensors of drawn rows take 12 bytes for each logit; sorted rows take 50, or a GPU's sort 32 beside what it sorts.
    """
    return vocab * (16 * min(num_rows, NUM_TOGETHER) + 56 * min(num_rows, NUM_SORTED_TOGETHER))


def draw_rows(logits: torch.Tensor, draws: Sequence[Draw], num_likely: int = NUM_LIKELY) -> torch.Tensor:
    """One token id (int64) for each row of fp32 logits [n, vocab]."""
    tokens = logits.argmax(dim=1)
    kinds: dict[str, list[int]] = {}
    for row, draw in enumerate(draws):
        if draw.temperature > 0:
            kinds.setdefault(_kind(draw, logits.shape[1], num_likely), []).append(row)
    together = [
        (kind, rows[first : first + NUM_TOGETHER])
        for kind, rows in kinds.items()
        for first in range(0, len(rows), NUM_TOGETHER)
    ]
    for kind, rows in together:
        limits = Limits.of([draws[row] for row in rows], logits)
        index = sent(np.array(rows), logits.device)
        weights = _weights(logits[index], limits)
        if kind == "free":
            tokens[index] = _pick(weights, limits)
        elif kind == "few":
            tokens[index] = _few(weights, limits, num_likely)[0]
        else:
            tokens[index] = _likely_or_all(weights, limits, num_likely)
        del weights  # before the next ones are made
    return tokens


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of some rows, as fp64 [n, 1]; they go to the device in one copy."""

    temperature: torch.Tensor
    top_k: torch.Tensor  # the size of the vocabulary: no limit
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def of(cls, draws: Sequence[Draw], logits: torch.Tensor) -> "Limits":
        vocab = logits.shape[1]
        table = np.array(
            [(max(d.temperature, 1e-6), _top_k(d, vocab) or vocab, d.top_p, d.min_p, d.uniform) for d in draws]
        )
        names = ("temperature", "top_k", "top_p", "min_p", "uniform")
        columns = sent(np.ascontiguousarray(table.T), logits.device).unsqueeze(2).unbind(0)
        return cls(**dict(zip(names, columns, strict=True)))

    def part(self, rows: slice) -> "Limits":
        return Limits(**{name: column[rows] for name, column in vars(self).items()})


def _top_k(draw: Draw, vocab: int) -> int | None:
    return draw.top_k if draw.top_k is not None and 0 < draw.top_k < vocab else None


def _kind(draw: Draw, vocab: int, num_likely: int) -> str:
    """`few` rows surely need no more than half of the likely tokens, `unsure` ones may need all."""
    top_k = _top_k(draw, vocab)
    if top_k is None and draw.top_p >= 1 and draw.min_p <= 0:
        return "free"
    return "few" if top_k is not None and 2 * top_k <= num_likely < vocab else "unsure"


def _likely_or_all(weights: torch.Tensor, limits: Limits, num_likely: int) -> torch.Tensor:
    if num_likely < weights.shape[1]:
        tokens, is_enough = _few(weights, limits, num_likely)
        # Asking the device waits for it. Sorting everything would take it longer than a step of a small model.
        if bool(is_enough):
            return tokens
    parts = [slice(first, first + NUM_SORTED_TOGETHER) for first in range(0, len(weights), NUM_SORTED_TOGETHER)]
    return torch.cat([_of_all(weights[part], limits.part(part)) for part in parts])


def _of_all(weights: torch.Tensor, limits: Limits) -> torch.Tensor:
    ordered, ids = weights.sort(dim=1, descending=True, stable=True)
    total = ordered.sum(dim=1, keepdim=True, dtype=torch.float64)
    chosen, _, _ = _limited(ordered, total, limits)
    return ids.gather(1, chosen[:, None])[:, 0]


def _few(weights: torch.Tensor, limits: Limits, num_likely: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn from the likeliest only, and whether these were enough for all rows."""
    _, ids = weights.topk(num_likely, dim=1, sorted=False)
    # Equal ones are ordered by id, which topk does not promise.
    ids = ids.sort(dim=1).values
    ordered, order = weights.gather(1, ids).sort(dim=1, descending=True, stable=True)
    chosen, num_first, num_left = _limited(ordered, weights.sum(dim=1, keepdim=True, dtype=torch.float64), limits)
    # All that min_p and top_k leave must be here, for top_p is a share of their mass; or there is only top_p.
    is_enough = (num_first < num_likely) | ((limits.min_p <= 0) & (limits.top_k >= weights.shape[1]))
    # The least of them may have equals that are not here: what is left must be likelier.
    is_enough &= ordered.gather(1, num_left - 1) > ordered[:, -1:]
    is_enough = is_enough.all()
    return ids.gather(1, order.gather(1, chosen[:, None]))[:, 0], is_enough


def _limited(
    ordered: torch.Tensor, total: torch.Tensor, limits: Limits
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """min_p, top_k and top_p, in this order, on weights with the likeliest first (it has weight 1 and always stays).

    `total` is of all tokens. Returns the drawn place of each row [n], and how many were left by the first two limits
    and by all [n, 1].
    """
    weights = ordered.double()
    places = torch.arange(weights.shape[1], device=weights.device)
    is_in = (weights >= limits.min_p) & (places < limits.top_k)
    is_in[:, 0] = True
    weights = torch.where(is_in, weights, 0)
    cumulated = weights.cumsum(dim=1)
    num_first = is_in.sum(dim=1, keepdim=True)
    mass = torch.where(num_first == weights.shape[1], total, cumulated[:, -1:])
    is_in &= (cumulated - weights < limits.top_p * mass) | (limits.top_p >= 1)
    is_in[:, 0] = True
    chosen = _pick(torch.where(is_in, weights, 0), limits)
    return chosen, num_first, is_in.sum(dim=1, keepdim=True)


def _weights(logits: torch.Tensor, limits: Limits) -> torch.Tensor:
    """exp of the scaled logits; the maximum goes first, so that a tiny temperature gives zeros, not infinities."""
    return ((logits - logits.amax(dim=1, keepdim=True)) / limits.temperature.float()).exp()


def _pick(weights: torch.Tensor, limits: Limits) -> torch.Tensor:
    """The place in each row of weights [n, m] where the cumulated weight passes the row's random number."""
    cumulated = weights.cumsum(dim=1, dtype=torch.float64)
    wanted = limits.uniform * cumulated[:, -1:]
    return torch.searchsorted(cumulated, wanted, right=True)[:, 0].clamp(max=weights.shape[1] - 1)
