"""One request under way: its tokens, its blocks of the cache, and how far it is."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from openwafer.serve.core import Event, Request, TokenLogprob, Usage

UNKNOWN = -1  # stands in `tokens` for a token that is being drawn


@dataclass(kw_only=True, eq=False)
class Sequence:
    """Filled by the engine's thread only. `tokens` is the prompt and what was drawn so far."""

    request: Request
    on_event: Callable[[Event], None]
    seed: int
    submitted_s: float
    order: int  # of submission: who came last gives way first
    tokens: list[int] = field(init=False)
    blocks: list[int] = field(default_factory=list)  # of the cache, by the block pool
    keys: list[bytes] = field(default_factory=list)  # names of the full blocks at the beginning, by the block pool
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_cached: int = 0  # of these, found in the prefix cache when the request first ran
    counts: Counter[int] = field(default_factory=Counter)  # drawn tokens, for the penalties of who is not `is_plain`
    drafts: list[int] = field(default_factory=list)  # guesses that are computed in this step
    num_accepted: int = 0
    num_rejected: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    in_flight: bool = False  # a batch is under way that its next token is drawn from
    num_ahead: int = 0  # UNKNOWN tokens at the end of `tokens`, by `ahead.py`
    drawn_at: int = 0  # with num_ahead: the last one's place among the tokens that its batch draws
    started_s: float | None = None  # first computed
    first_token_s: float | None = None

    is_plain: bool = field(init=False)  # nothing is added to its logits, and nobody looks at them

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        sampling = self.request.sampling
        self.is_plain = (
            self.request.constraint is None
            and not sampling.logit_bias
            and sampling.num_logprobs is None
            and not sampling.prompt_logprobs
            and sampling.frequency_penalty == 0
            and sampling.presence_penalty == 0
        )

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_drawn(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_left(self) -> int:
        """Tokens that are known and not computed: one while decoding, more of a prompt or after a preemption."""
        return len(self.tokens) - self.num_computed

    def usage(self, now_s: float) -> Usage:
        started = self.started_s if self.started_s is not None else now_s
        first = self.first_token_s if self.first_token_s is not None else now_s
        return Usage(
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached,
            num_completion_tokens=self.num_drawn,
            num_accepted_prediction_tokens=self.num_accepted,
            num_rejected_prediction_tokens=self.num_rejected,
            queue_s=started - self.submitted_s,
            prompt_s=first - started,
            completion_s=now_s - first,
        )
