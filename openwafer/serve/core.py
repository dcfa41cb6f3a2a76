"""What the server and the engine say to each other: requests, what comes back, and what an engine does.

The engine knows token ids only. Everything here is plain data, so that a server can be tested without a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 takes the likeliest."""

    max_tokens: int  # at least 1; the engine stops earlier where the model's context ends
    min_tokens: int = 0  # `stop_ids` cannot be drawn before this many
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: the engine draws one
    stop_ids: frozenset[int] = frozenset()  # end the answer and are not given out
    num_logprobs: int | None = None  # None: no logprobs; 0: of the drawn token only; n: also of the n likeliest
    prompt_logprobs: bool = False  # logprobs of the prompt's tokens too


class Constraint(Protocol):
    """Which tokens may come next. One object per request, used by the engine's thread only."""

    def allowed(self) -> bytes | None:
        """A bitmask over the vocabulary (bit i of byte i // 8: token i), or None when everything is allowed."""
        ...

    def advance(self, token: int) -> None:
        """This token was drawn; it was allowed."""
        ...

    @property
    def is_done(self) -> bool:
        """Nothing may follow: the engine finishes with `stop`."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt to be continued once (`n` answers are `n` requests)."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    constraint: Constraint | None = None
    prediction: tuple[int, ...] = ()  # what the answer will probably be: speculated on, never forced
    client: str = ""  # whose it is: the queue is fair between clients


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token's log-probability, and the likeliest alternatives in falling order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counted by the engine; times in seconds."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0
    queue_s: float = 0.0
    prompt_s: float = 0.0
    completion_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened to a request: new tokens, and its end. The last event has a `finish_reason`."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token when asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # once, in the first event; None for the first token
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason `error`: what to tell the user
    usage: Usage | None = None  # with finish_reason


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """How the engine stands now, and what it has done since it started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0..1
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_guessed_tokens: int = 0  # ahead, by speculation
    num_right_tokens: int = 0  # of these
    last_progress_s: float = 0.0  # time.monotonic() of the last finished engine step, or of becoming idle
    stage_busy_s: tuple[float, ...] = ()  # seconds that each stage of a pipeline has computed
    failure: str | None = None  # why the engine has stopped by itself


class QueueFullError(Exception):
    """The engine takes no more requests now (the server answers 503)."""


class Engine(Protocol):
    """Decodes requests. Thread-safe; events are delivered from the engine's own thread, in order per request."""

    max_context: int  # prompt and answer together
    vocab_size: int

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Queue a request, or raise QueueFullError. `on_event` must not block."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request and free what it holds; its last event says `cancelled`. Unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Stop; requests under way end with `cancelled`."""
        ...
