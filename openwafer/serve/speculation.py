"""Guesses of the next tokens, computed together with the last one and kept as far as they were right.

A guess is right if the sampler draws it: randomness belongs to the place in the answer, and no result depends on how
many rows are computed at once, so an answer is the same, bit for bit, with and without guesses.
"""

from collections.abc import Sequence as Items
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from openwafer.serve.block_pool import BlockPool
from openwafer.serve.runner import Batch, Runner
from openwafer.serve.sampler import SamplingError, draw
from openwafer.serve.sequence import Sequence

_LONGEST, _SHORTEST = 4, 2  # tokens that must have been seen before in the same order
_BYTES = 4


class Speculator(Protocol):
    def guess(self, sequences: Items[Sequence], max_tokens: int) -> list[list[int]]:
        """Up to `max_tokens` guesses for each of some sequences whose last token is to be computed."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """This sequence has ended or given way."""
        ...

    def close(self) -> None: ...


class Lookup:
    """What followed the last few tokens when they were seen before: in the text so far, or in the prediction."""

    def __init__(self, *, in_text: bool) -> None:
        self.in_text = in_text  # else in predictions only
        self._texts: WeakKeyDictionary[Sequence, bytearray] = WeakKeyDictionary()
        self._predictions: WeakKeyDictionary[Sequence, bytes] = WeakKeyDictionary()

    def guess(self, sequences: Items[Sequence], max_tokens: int) -> list[list[int]]:
        return [self._guess(sequence, max_tokens) for sequence in sequences]

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)
        self._predictions.pop(sequence, None)

    def close(self) -> None:
        pass

    def _guess(self, sequence: Sequence, max_tokens: int) -> list[int]:
        prediction = sequence.request.prediction
        if prediction and sequence.num_drawn == 0:
            return list(prediction[:max_tokens])
        if not prediction and not self.in_text:
            return []
        text = self._texts.setdefault(sequence, bytearray())
        text += np.array(sequence.tokens[len(text) // _BYTES :], np.int32).tobytes()
        if prediction:
            stored = self._predictions.get(sequence)
            if stored is None:
                stored = self._predictions[sequence] = np.array(prediction, np.int32).tobytes()
            # An answer that follows its prediction from the start needs no run of tokens to be recognised.
            if found := _after_same(stored, text, min(_LONGEST, sequence.num_drawn), 1, max_tokens):
                return found
        return _after_same(text, text, _LONGEST, _SHORTEST, max_tokens) if self.in_text else []


def _after_same(where: bytes | bytearray, text: bytearray, longest: int, shortest: int, max_tokens: int) -> list[int]:
    """What follows the last place in `where` that has the last tokens of `text`, the longest run first."""
    for length in range(longest, shortest - 1, -1):
        end = bytes(text[-length * _BYTES :])
        if len(end) < length * _BYTES:
            continue
        stop = len(where) - _BYTES  # something must follow
        while (at := where.rfind(end, 0, max(stop, 0))) >= 0:
            if at % _BYTES == 0:
                start = at + len(end)
                return np.frombuffer(bytes(where[start : start + max_tokens * _BYTES]), np.int32).tolist()
            stop = at + len(end) - 1
    return []


class DraftModel:
    """A small model of the same vocabulary guesses; it has a cache of its own and computes all guesses together."""

    def __init__(self, runner: Runner, *, max_rows: int, max_context: int) -> None:
        self._runner = runner
        self._max_context = max_context
        self._pool = BlockPool(runner.num_blocks, runner.block_size, prefix_cache=False)
        self._max_rows = max_rows
        self._twins: dict[Sequence, Sequence] = {}  # the same tokens, with blocks of the draft's cache

    def guess(self, sequences: Items[Sequence], max_tokens: int) -> list[list[int]]:
        twins = [self._twin(sequence) for sequence in sequences]
        known = [len(sequence.tokens) for sequence in sequences]
        active = [
            twin
            for twin, length in zip(twins, known, strict=True)
            if length + max_tokens <= self._max_context and self._pool.grow(twin, length + max_tokens)
        ]
        for _ in range(max_tokens):
            logits = self._compute(active)
            for twin, row in zip(list(active), logits, strict=True):
                try:
                    twin.tokens.append(draw(row, twin.request.sampling, twin.seed, twin.num_drawn, twin.counts))
                except SamplingError:
                    active.remove(twin)
        return [twin.tokens[length:] for twin, length in zip(twins, known, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        twin = self._twins.pop(sequence, None)
        if twin is not None:
            self._pool.release(twin)

    def close(self) -> None:
        self._runner.close()

    def _twin(self, sequence: Sequence) -> Sequence:
        twin = self._twins.get(sequence)
        if twin is None:
            twin = self._twins[sequence] = Sequence(
                request=sequence.request, on_event=_ignore, seed=sequence.seed, submitted_s=0.0, order=0
            )
        # Computed tokens stay as far as the guesses were right.
        same = 0
        for mine, other in zip(twin.tokens, sequence.tokens, strict=False):
            if mine != other:
                break
            same += 1
        twin.num_computed = min(twin.num_computed, same, len(sequence.tokens) - 1)
        twin.tokens = list(sequence.tokens)
        twin.counts = sequence.counts.copy()
        return twin

    def _compute(self, twins: Items[Sequence]) -> list[np.ndarray]:
        """The logits after the last token of each, whatever has to be computed for it."""
        last: dict[Sequence, np.ndarray] = {}
        while waiting := [twin for twin in twins if twin.num_left > 0]:
            pieces: list[tuple[Sequence, int]] = []
            room = self._max_rows
            for twin in waiting:
                if room == 0:
                    break
                pieces.append((twin, min(room, twin.num_left)))
                room -= pieces[-1][1]
            ends = np.cumsum([count for _, count in pieces])
            ranges = [range(twin.num_computed, twin.num_computed + count) for twin, count in pieces]
            width = max(len(twin.blocks) for twin, _ in pieces)
            batch = Batch(
                tokens=np.array(
                    [twin.tokens[i] for (twin, _), r in zip(pieces, ranges, strict=True) for i in r], np.int32
                ),
                positions=np.array([i for r in ranges for i in r], np.int32),
                sequences=np.repeat(np.arange(len(pieces)), [count for _, count in pieces]).astype(np.int32),
                tables=np.array([t.blocks + [0] * (width - len(t.blocks)) for t, _ in pieces], np.int32),
                logit_rows=(ends - 1).astype(np.int32),
            )
            for (twin, count), row in zip(pieces, self._runner.run(batch), strict=True):
                twin.num_computed += count
                last[twin] = row
        return [last[twin] for twin in twins]


def _ignore(event: object) -> None:
    """A draft's tokens are nobody's answer."""
