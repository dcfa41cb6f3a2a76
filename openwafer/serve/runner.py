"""What the engine asks of whoever computes the model: one batch of tokens in, logits out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
    # [r], for an `AheadRunner`: a row's token is the one that the batch before drew at this place of its logit_rows;
    # negative where the token is given.
    follows: np.ndarray | None = None


class Runner(Protocol):
    """Owns the weights and the key/value cache.

    The logits of a row depend on its sequence's tokens up to it, and on nothing else in the batch, bit for bit (a GPU
    keeps this up to rounding only).
    """

    block_size: int
    num_blocks: int

    def run(self, batch: Batch) -> np.ndarray:
        """Store the keys and values of all rows; fp32 logits [logit_rows, vocab], valid until the next call."""
        ...

    def close(self) -> None: ...


class StageRunner(Runner, Protocol):
    """Runs a region of a model; only the residual stream goes from one region to the next."""

    def run_stage(self, batch: Batch, x: np.ndarray | None) -> np.ndarray:
        """`x` is fp32 [rows, hidden], None for the first region. Returns the same of this region; the last, logits."""
        ...


@runtime_checkable
class DrawingStageRunner(StageRunner, Protocol):
    """A last region that draws tokens itself, where its logits are."""

    def draw_stage(self, batch: Batch, x: np.ndarray | None, draws: "Sequence[Draw | None]") -> "Drawn":
        """As `run_stage`, with a token for each wanted row that has a Draw and the logits of the others."""
        ...


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How a token is drawn from a row that nothing is added to or forbidden in; as in `sampler.draw`."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    uniform: float  # the random number in [0, 1) that decides


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What came of a batch whose tokens were drawn where the logits are; n wanted rows."""

    tokens: np.ndarray  # [n], of rows with a Draw
    tops: np.ndarray  # fp32 [n], each row's largest logit: not finite where no token could be drawn
    logits: np.ndarray  # fp32 [rows without a Draw, vocab], in order


@runtime_checkable
class DrawingRunner(Runner, Protocol):
    """A runner far from the host, which draws tokens itself: a row of logits is half a megabyte, a token is not."""

    def run_and_draw(self, batch: Batch, draws: Sequence[Draw | None]) -> Drawn:
        """As `run`, with a token for each wanted row that has a Draw and the logits of the others."""
        ...


@runtime_checkable
class AheadRunner(DrawingRunner, Protocol):
    """A batch may be launched before the last one has landed, and follow tokens that nobody knows yet."""

    def launch(self, batch: Batch, draws: Sequence[Draw | None]) -> None:
        """Begin a batch; two may be under way."""
        ...

    def land(self) -> Drawn:
        """Wait for the oldest batch under way."""
        ...


@runtime_checkable
class FlyingRunner(Runner, Protocol):
    """A runner of several stages: batches follow one another through them, and come out in order.

    At every stage a batch is over before the next one begins. So a batch may use blocks of the cache that an earlier
    one fills, or take over blocks that an earlier one still reads.
    """

    max_in_flight: int  # batches under way that keep all stages busy

    def launch(self, batch: Batch, draws: Sequence[Draw | None]) -> None:
        """Begin a batch, with a Draw or None for each wanted row as in `DrawingRunner.run_and_draw`."""
        ...

    def land(self) -> Drawn:
        """Wait for the oldest batch under way."""
        ...

    def check(self) -> None:
        """Raise if a stage is lost."""
        ...

    def abandon(self) -> None:
        """End the stages whatever they are doing; whoever waits in `land` is told."""
        ...

    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each stage has computed."""
        ...
