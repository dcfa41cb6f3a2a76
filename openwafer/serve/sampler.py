"""The next token from a row of logits. Randomness is a function of the request's seed and the token's place.

Nothing else goes in, so a request draws the same tokens whenever and beside whomever it is computed.
"""

import hashlib
import math
import struct

import numpy as np

from openwafer.serve.core import Sampling, TokenLogprob
from openwafer.serve.runner import Draw

# Steps in which the candidates are widened until they hold what top_k and top_p ask for.
_THRESHOLDS = (2.0**-4, 2.0**-8, 2.0**-14, 2.0**-24, 0.0)


class SamplingError(Exception):
    """No token can be drawn; the message is for the user."""


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) from the seed and the number of tokens drawn before."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), place), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def draw(
    logits: np.ndarray,
    sampling: Sampling,
    seed: int,
    place: int,
    counts: dict[int, int],
    mask: bytes | None = None,
) -> int:
    """One token from fp32 logits [vocab]; `place` is the number of tokens drawn before, `counts` says which.

    `mask` has a bit for each token that may come (bit i of byte i // 8: token i).
    """
    adjusted = _adjusted(logits, sampling, place, counts, mask)
    likeliest = int(adjusted.argmax())
    refuse_infinite(float(adjusted[likeliest]))
    if sampling.temperature == 0:
        return likeliest
    return _drawn(adjusted, likeliest, sampling, uniform(seed, place))


def draw_plain(logits: np.ndarray, how: Draw) -> tuple[int, float]:
    """As `draw` from logits that nothing is added to or forbidden in: the token, and the largest logit.

    Where that is not finite the token means nothing.
    """
    likeliest = int(logits.argmax())
    top = float(logits[likeliest])
    if how.temperature == 0 or not math.isfinite(top):
        return likeliest, top
    return _drawn(logits, likeliest, how, how.uniform), top


def _drawn(logits: np.ndarray, likeliest: int, how: Draw | Sampling, chance: float) -> int:
    # The maximum goes first, so that a tiny temperature gives zeros and not infinities.
    weights = np.exp((logits - logits[likeliest]) / np.float32(max(how.temperature, 1e-6)))
    ids = _candidates(weights, how)
    cumulated = np.cumsum(weights if ids is None else weights[ids], dtype=np.float64)
    index = int(np.searchsorted(cumulated, chance * cumulated[-1], side="right"))
    index = min(index, len(cumulated) - 1)
    return index if ids is None else int(ids[index])


def refuse_infinite(top: float) -> None:
    """The largest logit of a row must be a number, else no token can be drawn."""
    if not math.isfinite(top):
        if top == -math.inf:
            raise SamplingError("no token is allowed here: constraint, logit_bias and min_tokens exclude them all")
        raise SamplingError("the model's output is not a number: its weights are damaged or overflow the dtype")


def logprobs_of(logits: np.ndarray, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """Of each row of logits [r, vocab]: the model's own log-probability of that token, and the likeliest ones."""
    result = []
    for row, token in zip(logits, tokens, strict=True):
        wide = row.astype(np.float64)
        wide -= wide.max()
        total = np.log(np.exp(wide).sum())
        top: tuple[tuple[int, float], ...] = ()
        if num_top:
            count = min(num_top, len(row))
            # Everything that ties with the last one is a candidate; equal ones are ordered by id.
            least = np.partition(row, len(row) - count)[len(row) - count]
            ids = np.flatnonzero(row >= least)
            ids = ids[np.lexsort((ids, -row[ids]))][:count]
            top = tuple((int(i), float(wide[i] - total)) for i in ids)
        result.append(TokenLogprob(logprob=float(wide[token] - total), top=top))
    return result


def _adjusted(
    logits: np.ndarray, sampling: Sampling, place: int, counts: dict[int, int], mask: bytes | None
) -> np.ndarray:
    """Logits after bias, penalties and what is forbidden; the given ones if there is nothing to do."""
    has_penalty = bool(counts) and (sampling.frequency_penalty != 0 or sampling.presence_penalty != 0)
    forbids_stop = place < sampling.min_tokens and bool(sampling.stop_ids)
    if not (sampling.logit_bias or has_penalty or forbids_stop or mask is not None):
        return logits
    logits = logits.copy()
    if sampling.logit_bias:
        ids = np.fromiter(sampling.logit_bias.keys(), np.int64)
        logits[ids] += np.fromiter(sampling.logit_bias.values(), np.float32)
    if has_penalty:
        ids = np.fromiter(counts.keys(), np.int64)
        times = np.fromiter(counts.values(), np.float32)
        logits[ids] -= np.float32(sampling.frequency_penalty) * times + np.float32(sampling.presence_penalty)
    if mask is not None:
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(logits), bitorder="little")
        logits[bits == 0] = -np.inf
    if forbids_stop:
        logits[[i for i in sampling.stop_ids if i < len(logits)]] = -np.inf
    return logits


def _candidates(weights: np.ndarray, sampling: Draw | Sampling) -> np.ndarray | None:
    """Ids that min_p, top_k and top_p leave, in this order, likeliest first (equal ones by id); None: all of them.

    Sorting the whole vocabulary would take longer than computing a small model; so the likely tokens are looked at
    first, and only as many more as the limits need. The likeliest has weight 1.
    """
    top_k = sampling.top_k if sampling.top_k is not None and 0 < sampling.top_k < len(weights) else None
    if top_k is None and sampling.top_p >= 1 and sampling.min_p <= 0:
        return None
    total = float(weights.sum(dtype=np.float64))
    ids = np.empty(0, np.int64)
    for threshold in (sampling.min_p,) if sampling.min_p > 0 else _THRESHOLDS:
        ids = np.flatnonzero(weights >= threshold)
        if top_k is not None:
            is_enough = len(ids) >= top_k
        else:
            is_enough = float(weights[ids].sum(dtype=np.float64)) >= sampling.top_p * total
        if is_enough:
            break
    ids = ids[np.lexsort((ids, -weights[ids]))][:top_k]
    if sampling.top_p < 1:
        chosen = weights[ids].astype(np.float64)
        mass = total if top_k is None and sampling.min_p <= 0 else float(chosen.sum())
        # An id stays while the likelier ones have not reached top_p; the likeliest always does.
        before = np.cumsum(chosen) - chosen
        ids = ids[: max(1, int(np.searchsorted(before, sampling.top_p * mass, side="left")))]
    return ids
