"""What the results of a step add to a sequence: its next tokens, and whether they were the last."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from openwafer.serve.batching import Rows
from openwafer.serve.core import FinishReason, TokenLogprob
from openwafer.serve.sampler import SamplingError, draw, logprobs_of, refuse_infinite
from openwafer.serve.scheduler import Work
from openwafer.serve.sequence import Sequence

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass
class Growth:
    """Tokens in order; without an end there is at least one."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    num_guessed: int = 0  # tokens that were guessed ahead, and how many of them were drawn
    num_right: int = 0


def grow(work: Work, rows: Rows, max_context: int) -> Growth | None:
    """Draw from a work's last rows, and go on as long as guesses were right; None if it was a piece of a prompt."""
    sequence, sampling = work.sequence, work.sequence.request.sampling
    if rows.logits is not None and len(rows) == work.stop - work.start:
        _note_prompt_logprobs(work, rows.logits)
    if not work.draws:
        return None
    known = len(sequence.tokens)
    sequence.in_flight = False
    first = len(rows) - (work.stop - known + 1)
    drafts, sequence.drafts = sequence.drafts, []
    growth = Growth()
    for index in range(len(rows) - first):
        try:
            token = _draw(sequence, rows, first + index)
            if token in sampling.stop_ids:
                growth.finish = "stop"
                break
            growth.finish = _append(sequence, token, max_context)
        except SamplingError as problem:
            growth.finish, growth.error = "error", str(problem)
            break
        growth.tokens.append(token)
        if sampling.num_logprobs is not None and rows.logits is not None:
            growth.logprobs += logprobs_of(rows.logits[first + index][None], [token], sampling.num_logprobs)
        if growth.finish is not None or index >= len(drafts) or token != drafts[index]:
            break
    growth.num_guessed = len(drafts)
    growth.num_right = sum(mine == guess for mine, guess in zip(growth.tokens, drafts, strict=False))
    if sequence.request.prediction:
        sequence.num_accepted += growth.num_right
        sequence.num_rejected += growth.num_guessed - growth.num_right
    sequence.num_computed = known + max(0, len(growth.tokens) - 1)
    return growth


def _draw(sequence: Sequence, rows: Rows, index: int) -> int:
    if rows.tokens is not None and rows.tops is not None:
        refuse_infinite(rows.tops[index])
        return rows.tokens[index]
    assert rows.logits is not None
    row, request = rows.logits[index], sequence.request
    mask = None
    if request.constraint is not None:
        mask = _asked(request.constraint.allowed)
    return draw(row, request.sampling, sequence.seed, sequence.num_drawn, sequence.counts, mask)


def _append(sequence: Sequence, token: int, max_context: int) -> FinishReason | None:
    """Take a drawn token in; says whether it was the last."""
    request = sequence.request
    if sequence.first_token_s is None:
        sequence.first_token_s = time.monotonic()
    sequence.tokens.append(token)
    if not sequence.is_plain:
        sequence.counts[token] += 1
    if (constraint := request.constraint) is not None:
        _asked(lambda: constraint.advance(token))
        if constraint.is_done:
            return "stop"
    if sequence.num_drawn >= request.sampling.max_tokens or len(sequence.tokens) >= max_context:
        return "length"
    return None


def _note_prompt_logprobs(work: Work, logits: np.ndarray) -> None:
    sequence = work.sequence
    if not sequence.request.sampling.prompt_logprobs:
        return
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)
    for position in range(work.start, min(work.stop, sequence.num_prompt - 1)):
        if position + 1 == len(sequence.prompt_logprobs):
            row, token = logits[position - work.start], sequence.tokens[position + 1]
            num_top = sequence.request.sampling.num_logprobs or 0
            sequence.prompt_logprobs += logprobs_of(row[None], [token], num_top)


def _asked(question: Callable[[], T]) -> T:
    """What a constraint says; its failure is its request's, not the engine's."""
    try:
        return question()
    except Exception as error:
        _log.exception("a constraint failed")
        raise SamplingError(f"the constraint on this answer failed: {error}") from error
