"""Who computes what in the next step.

Answers under way come first, one token each (and guesses); what is left of the step's tokens goes to prompts,
in pieces. When blocks run out, the request that came last gives way: its blocks are freed and it is computed
again later, with the same result, because no result depends on who else is there.

With a pipeline of stages several steps are under way at once (`num_groups`): the requests are divided over them. One
whose next token is being computed waits for it; pieces of a prompt follow one another without waiting.
"""

from dataclasses import dataclass

from openwafer.serve.block_pool import BlockPool
from openwafer.serve.fair_queue import FairQueue
from openwafer.serve.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Work:
    """Tokens `start` to `stop` of `sequence.tokens + sequence.drafts` are computed in this step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def draws(self) -> bool:
        """Whether the step ends with logits that the next token is drawn from."""
        return self.stop >= len(self.sequence.tokens)


class Scheduler:
    def __init__(self, pool: BlockPool, *, max_running: int, max_step_tokens: int, num_groups: int = 1) -> None:
        self.pool = pool
        self.waiting = FairQueue()
        self.running: list[Sequence] = []  # in order of submission
        self.num_preemptions = 0
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._num_groups = num_groups
        self.is_short = False  # of blocks, in the last plan: somebody waits for one in flight to give way

    @property
    def group_size(self) -> int:
        """Requests that take part in one step at most, so that every group has its share."""
        return -(-len(self.running) // self._num_groups)

    def decoding(self) -> list[Sequence]:
        """Those whose next token can be computed now."""
        return [s for s in self.running if s.num_left == 1 and not s.in_flight]

    def plan(self) -> list[Work]:
        """The next step; admits who fits and makes room by preemption."""
        self._admit()
        self.is_short = False
        works: list[Work] = []
        budget = self._max_step_tokens
        num_preemptions = self.num_preemptions
        computing = [s for s in self.running if s.num_left > 1 and not s.in_flight]
        size = self.group_size
        for sequence in [*self.decoding(), *computing]:
            if budget == 0 or len(works) == size:
                break
            if self.num_preemptions > num_preemptions and sequence not in self.running:
                continue  # gave way a moment ago
            stop = min(sequence.num_computed + budget, len(sequence.tokens) + len(sequence.drafts))
            del sequence.drafts[max(0, stop - len(sequence.tokens)) :]
            if not self._make_room(sequence, stop, works):
                continue
            works.append(Work(sequence=sequence, start=sequence.num_computed, stop=stop))
            budget -= stop - sequence.num_computed
        return works

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting, and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pool.release(sequence)

    def _admit(self) -> None:
        """Let in who waits while there is a place and room for the prompt, or for what is left of it."""
        while len(self.running) < self._max_running and (sequence := self.waiting.peek()) is not None:
            self.pool.adopt_prefix(sequence)
            needed = -(-(len(sequence.tokens) + 1) // self.pool.block_size) - len(sequence.blocks)
            if self.running and needed > self.pool.num_free - self._promised():
                self.pool.release(sequence)
                return
            self.waiting.pop()
            if sequence.started_s is None:
                sequence.num_cached = sequence.num_computed
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.order)

    def _promised(self) -> int:
        """Blocks that the prompts under way will still take."""
        size = self.pool.block_size
        return sum(max(0, -(-len(s.tokens) // size) - len(s.blocks)) for s in self.running)

    def _make_room(self, sequence: Sequence, num_tokens: int, works: list[Work]) -> bool:
        """Blocks for `num_tokens` tokens; False if the sequence had to give way, or has to wait for one in flight."""
        while not self.pool.grow(sequence, num_tokens):
            last = self.running[-1]
            if last.in_flight or last.num_ahead:
                self.is_short = True
                return False  # its token comes first; then it gives way
            self._preempt(last)
            works[:] = [work for work in works if work.sequence is not last]
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(sequence)
        self.pool.release(sequence)
        sequence.drafts.clear()
        self.waiting.push_front(sequence)
