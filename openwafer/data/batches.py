"""The order of samples: a shuffled pass over the data, random access at any step, no state.

The order depends on the seed and the step only, so it is the same for any number of workers and after any
resume.
"""

import numpy as np

from openwafer.data.shards import Shards
from openwafer.errors import UserError

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_NUM_ROUNDS = 6


class Batches:
    """Batches of `batch_size` samples of `context` tokens.

    Sample i is tokens [i * context : i * context + context + 1]; every sample comes once per epoch, in an
    order reshuffled each epoch. Batches run across the border of epochs, so all have the same size.
    """

    def __init__(self, shards: Shards, context: int, batch_size: int, seed: int = 0):
        if context < 1 or batch_size < 1:
            raise UserError(f"context and batch_size must be at least 1, got {context} and {batch_size}")
        self.shards = shards
        self.context = context
        self.batch_size = batch_size
        self.seed = seed
        self.num_samples = (len(shards) - 1) // context
        if self.num_samples < 1:
            raise UserError(
                f"{shards.folder} has {len(shards)} {shards.split} tokens, fewer than one sample of "
                f"{context} + 1: shorten the context or add data"
            )

    def samples(self, step: int) -> np.ndarray:
        """Which samples make up the batch of this step: int64 [batch_size]."""
        epoch, first = divmod(step * self.batch_size, self.num_samples)
        position = first + np.arange(self.batch_size, dtype=np.int64)
        # An epoch's key is a function of (seed, epoch); a batch that crosses a border uses two or more.
        epochs = (position // self.num_samples).astype(np.uint64) + np.uint64(epoch & _MASK64)
        keys = _mix(epochs + _mix(np.full(1, self.seed & _MASK64, dtype=np.uint64)))
        return permuted(position % self.num_samples, self.num_samples, keys)

    def at(self, step: int, rows: range | None = None) -> dict[str, np.ndarray]:
        """`input_ids` and `labels` of a step (counted from 0), int64 [batch_size, context].

        labels[:, t] is the token that follows input_ids[:, t]. With `rows`, only these rows of the batch are
        read: a worker's share.
        """
        samples = self.samples(step)
        if rows is not None:
            samples = samples[rows.start : rows.stop : rows.step]
        runs = np.empty((len(samples), self.context + 1), dtype=np.int64)
        for row, sample in enumerate(samples.tolist()):
            runs[row] = self.shards.tokens(sample * self.context, self.context + 1)
        return {"input_ids": runs[:, :-1].copy(), "labels": runs[:, 1:].copy()}


def permuted(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where each index (int64 [n], below `size`) goes under the keyed permutation of range(size).

    A Feistel network over the smallest even number of bits that holds `size`; a value that lands outside is
    sent through again until it is inside (fewer than four passes on average). No table, so a corpus of any
    size costs nothing. `keys` is uint64 [n], one per index.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = indices.astype(np.uint64)
    todo = np.arange(values.size)
    while todo.size:
        left, right = values[todo] >> half, values[todo] & mask
        for number in range(_NUM_ROUNDS):
            round_key = keys[todo] + np.uint64(_GOLDEN * (number + 1) & _MASK64)
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        values[todo] = (left << half) | right
        todo = todo[values[todo] >= np.uint64(size)]
    return values.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: each input bit changes each output bit with probability near a half."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
