"""From the works of a step to the runner's batch, and back from its results to each work."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import cast

import numpy as np

from openwafer.serve.runner import AheadRunner, Batch, Draw, DrawingRunner, Drawn, FlyingRunner, Runner
from openwafer.serve.sampler import uniform
from openwafer.serve.scheduler import Work


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a step found for one work: the logits of its last rows, or the tokens drawn from them already."""

    logits: np.ndarray | None = None  # fp32 [n, vocab]
    tokens: Items[int] | None = None  # n, where there are no logits
    tops: Items[float] | None = None  # n, the largest logits, with `tokens`

    def __len__(self) -> int:
        found = self.tokens if self.logits is None else self.logits
        assert found is not None
        return len(found)


class Flight:
    """Works under way. A plain runner computes them when they are launched, one of several stages meanwhile."""

    def __init__(self, runner: Runner, works: Items[Work]) -> None:
        """Tokens are drawn by the runner where it can and the request asks for nothing special."""
        self.works = works
        self.draws = [work.draws for work in works]  # now: a sequence may get more tokens before this lands
        self._counts = [num_logit_rows(work) for work in works]
        self._flying: AheadRunner | FlyingRunner | None = None
        self._draws: list[Draw | None] = []
        self._logits: np.ndarray | None = None
        self._drawn: Drawn | None = None
        batch = make_batch(works, self._counts)
        # Asking for the names, because asking for the protocols takes 0.3 ms of each step.
        can_launch, can_draw = hasattr(runner, "launch"), hasattr(runner, "run_and_draw")
        if not (can_launch or can_draw):
            self._logits = runner.run(batch)
            return
        self._draws = [draw for work, count in zip(works, self._counts, strict=True) for draw in _draws(work, count)]
        if can_launch:
            self._flying = cast(AheadRunner, runner)
            self._flying.launch(batch, self._draws)
        else:
            self._drawn = cast(DrawingRunner, runner).run_and_draw(batch, self._draws)

    def drawn_places(self) -> list[int | None]:
        """Of each work, the place of its token among the drawn ones; None if the host has to look at it first."""
        places: list[int | None] = []
        at = 0
        for work, count in zip(self.works, self._counts, strict=True):
            is_simple = count == 1 and self._draws[at] is not None and not work.sequence.request.prediction
            places.append(at if is_simple else None)
            at += count
        return places

    def land(self) -> list[Rows]:
        """What was found for each work. Flights of one runner land in the order in which they were launched."""
        starts = np.cumsum([0, *self._counts]).tolist()
        if (logits := self._logits) is not None:
            return [Rows(logits=logits[at : at + count]) for at, count in zip(starts, self._counts, strict=False)]
        drawn = self._flying.land() if self._flying is not None else self._drawn
        assert drawn is not None
        tokens, tops = drawn.tokens.tolist(), drawn.tops.tolist()
        results: list[Rows] = []
        num_logits = 0
        for start, count in zip(starts, self._counts, strict=False):
            if count and self._draws[start] is None:
                results.append(Rows(logits=drawn.logits[num_logits : num_logits + count]))
                num_logits += count
            else:
                stop = start + count
                results.append(Rows(tokens=tokens[start:stop], tops=tops[start:stop]))
        return results


def make_batch(works: Items[Work], num_logits: Items[int]) -> Batch:
    """The tokens of all works; of each, the logits of its last rows are wanted."""
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    logit_rows: list[int] = []
    follows: dict[int, int] = {}
    for index, (work, count) in enumerate(zip(works, num_logits, strict=True)):
        sequence = work.sequence
        known = len(sequence.tokens)
        if work.stop == known == work.start + 1:
            # A decoded token, which most works are: with 128 of them a step's time on the host is felt.
            logit_rows += [len(tokens)] * count
            if sequence.num_ahead:
                follows[len(tokens)] = sequence.drawn_at
            tokens.append(sequence.tokens[-1])
            positions.append(work.start)
            sequences.append(index)
            continue
        tokens += sequence.tokens[work.start : min(work.stop, known)]
        tokens += sequence.drafts[: max(0, work.stop - known)]
        positions += range(work.start, work.stop)
        sequences += [index] * (work.stop - work.start)
        logit_rows += range(len(tokens) - count, len(tokens))
    tables = np.zeros((len(works), max(len(work.sequence.blocks) for work in works)), np.int32)
    for row, work in zip(tables, works, strict=True):
        row[: len(work.sequence.blocks)] = work.sequence.blocks
    places: np.ndarray | None = None
    if follows:
        places = np.full(len(tokens), -1, np.int32)
        places[list(follows)] = list(follows.values())
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        sequences=np.array(sequences, np.int32),
        tables=tables,
        logit_rows=np.array(logit_rows, np.int32),
        follows=places,
    )


def num_logit_rows(work: Work) -> int:
    """The last rows of a work, those whose logits are looked at."""
    sequence = work.sequence
    if sequence.request.sampling.prompt_logprobs and len(sequence.prompt_logprobs) < sequence.num_prompt:
        return work.stop - work.start
    return work.stop - len(sequence.tokens) + 1 if work.draws else 0


_GREEDY = Draw(temperature=0.0, top_k=None, top_p=1.0, min_p=0.0, uniform=0.0)


def _draws(work: Work, count: int) -> Items[Draw | None]:
    """How the last `count` rows of a work are drawn from; None for all where the host must see the logits."""
    sequence, sampling = work.sequence, work.sequence.request.sampling
    if not sequence.is_plain or (sampling.stop_ids and sequence.num_drawn < sampling.min_tokens):
        return [None] * count
    if sampling.temperature == 0:
        return [_GREEDY] * count
    return [
        Draw(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            uniform=uniform(sequence.seed, sequence.num_drawn + index),
        )
        for index in range(count)
    ]
