"""An engine without a model: it writes what its script says, one token at a time, and keeps the protocol."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from openwafer.serve.core import EngineStats, Event, QueueFullError, Request, TokenLogprob, Usage

Script = Callable[[Request], list[int]]


@dataclass(eq=False)
class _Running:
    request: Request
    on_event: Callable[[Event], None]
    script: list[int]
    submitted: float
    began: float = 0.0
    first: float = 0.0
    written: list[int] = field(default_factory=list)


class ScriptEngine:
    """`script(request)` is the answer. Constraints are kept: a token that is not allowed is replaced by one that is.

    A token t has the logprob -(t % 7) / 10 - 0.1, and the alternatives t + 1, t + 2, ... so that tests can
    compute what must come back.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        max_context: int = 4096,
        max_running: int = 256,
        max_waiting: int = 64,
        step_s: float = 0.0,
    ) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.step_s = step_s
        self.is_hung = False
        self.failure: str | None = None  # what it says it has died of
        self.submitted: list[Request] = []
        self._max_running, self._max_waiting = max_running, max_waiting
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, _Running] = {}
        self._cancelled: set[str] = set()
        self._lock = threading.Condition()
        self._is_closed = False
        self._last_progress = time.monotonic()
        self._num_prompt = self._num_generated = 0
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        with self._lock:
            if len(self._waiting) >= self._max_waiting:
                raise QueueFullError
            running = _Running(request, on_event, self.script(request), time.monotonic())
            self.submitted.append(request)
            self._waiting[request.id] = running
            self._lock.notify()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._running or request_id in self._waiting:
                self._cancelled.add(request_id)
                self._lock.notify()

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                kv_cache_usage=min(len(self._running) / self._max_running, 1.0),
                num_prompt_tokens=self._num_prompt,
                num_generated_tokens=self._num_generated,
                last_progress_s=self._last_progress,
                failure=self.failure,
            )

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._cancelled.update(self._running, self._waiting)
            self._lock.notify()
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not (self._running or self._waiting or self._cancelled or self._is_closed) or self.is_hung:
                    if not self.is_hung:
                        self._last_progress = time.monotonic()
                    self._lock.wait(timeout=0.05)
                    if self.is_hung and self._is_closed:
                        break
                ended = self._end_cancelled()
                while self._waiting and len(self._running) < self._max_running:
                    key = next(iter(self._waiting))
                    self._start(key, self._waiting.pop(key))
                batch = list(self._running.values())
            for running in ended:
                running.on_event(Event(finish_reason="cancelled", usage=_usage(running)))
            if self._is_closed and not batch:
                return
            if self.step_s and batch:
                time.sleep(self.step_s)
            for running in batch:
                self._step(running)
            self._last_progress = time.monotonic()

    def _end_cancelled(self) -> list[_Running]:
        found = [self._running.pop(key, None) or self._waiting.pop(key, None) for key in self._cancelled]
        self._cancelled.clear()
        return [running for running in found if running is not None]

    def _start(self, key: str, running: _Running) -> None:
        running.began = time.monotonic()
        self._num_prompt += len(running.request.prompt)
        self._running[key] = running

    def _step(self, running: _Running) -> None:
        request, sampling = running.request, running.request.sampling
        running.first = running.first or time.monotonic()
        at = len(running.written)
        token = running.script[at] if at < len(running.script) else None
        reason = None
        if request.constraint is not None:
            token = _allowed(request.constraint.allowed(), token, sampling.stop_ids)
        if token is None or token in sampling.stop_ids:
            self._finish(running, Event(finish_reason="stop"), at == 0)
            return
        running.written.append(token)
        self._num_generated += 1
        if request.constraint is not None:
            request.constraint.advance(token)
            if request.constraint.is_done:
                reason = "stop"
        if reason is None and len(running.written) >= sampling.max_tokens:
            reason = "length"
        event = Event(
            tokens=(token,),
            logprobs=() if sampling.num_logprobs is None else (logprob_of(token, sampling.num_logprobs),),
            prompt_logprobs=_prompt_logprobs(request) if at == 0 else (),
            finish_reason=reason,
        )
        if reason is None:
            running.on_event(event)
        else:
            self._finish(running, event, False)

    def _finish(self, running: _Running, event: Event, with_prompt: bool) -> None:
        with self._lock:
            self._running.pop(running.request.id, None)
        prompt_logprobs = _prompt_logprobs(running.request) if with_prompt else event.prompt_logprobs
        running.on_event(
            Event(
                tokens=event.tokens,
                logprobs=event.logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=event.finish_reason,
                usage=_usage(running),
            )
        )


def logprob_of(token: int, num_top: int) -> TokenLogprob:
    def value(rank: int) -> float:
        return -(token % 7) / 10 - 0.1 - rank

    return TokenLogprob(logprob=value(0), top=tuple((token + rank, value(rank)) for rank in range(num_top)))


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...]:
    if not request.sampling.prompt_logprobs:
        return ()
    num_top = request.sampling.num_logprobs or 0
    return (None, *(logprob_of(token, num_top) for token in request.prompt[1:]))


def _allowed(mask: bytes | None, token: int | None, stop_ids: frozenset[int]) -> int | None:
    """The script's token where it is allowed, else the end where it is allowed, else the lowest allowed one."""

    def is_allowed(candidate: int) -> bool:
        return mask is None or bool(mask[candidate // 8] >> (candidate % 8) & 1)

    if token is not None and is_allowed(token):
        return token
    if any(map(is_allowed, stop_ids)):
        return None
    return next(i for i in itertools.count() if is_allowed(i))


def _usage(running: _Running) -> Usage:
    now = time.monotonic()
    began, first = running.began or now, running.first or now
    return Usage(
        num_prompt_tokens=len(running.request.prompt),
        num_cached_tokens=min(2, len(running.request.prompt)),
        num_completion_tokens=len(running.written),
        queue_s=began - running.submitted,
        prompt_s=max(first - began, 1e-6),
        completion_s=max(now - first, 1e-6),
    )
