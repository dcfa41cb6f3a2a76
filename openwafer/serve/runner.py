"""What the engine asks of whoever computes the model: one batch of tokens in, logits out."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens of several sequences, each sequence's tokens together and in order; all arrays are int32.

    r rows (tokens), s sequences, b blocks of the longest sequence.
    """

    tokens: np.ndarray  # [r]
    positions: np.ndarray  # [r]
    sequences: np.ndarray  # [r], which row of `tables`
    tables: np.ndarray  # [s, b], the cache block of each run of block_size positions
    logit_rows: np.ndarray  # rows whose logits are wanted


class Runner(Protocol):
    """Owns the weights and the key/value cache.

    The logits of a row depend on its sequence's tokens up to it, and on nothing else in the batch, bit for bit.
    """

    block_size: int
    num_blocks: int

    def run(self, batch: Batch) -> np.ndarray:
        """Store the keys and values of all rows; fp32 logits [logit_rows, vocab], valid until the next call."""
        ...

    def close(self) -> None: ...
