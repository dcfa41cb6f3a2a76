"""The engine: a thread that plans a step, runs it, draws tokens and tells the requests, over and over.

`open_engine` loads a model and starts one. The scheduler says who computes what, the runner computes, the sampler
draws; this file is the loop between them.
"""

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from openwafer.errors import UserError
from openwafer.models.config import ModelConfig
from openwafer.models.load import open_model
from openwafer.models.tokenizer import Tokenizer
from openwafer.serve.ahead import catch_up, go_ahead, step_back
from openwafer.serve.batching import Flight, Rows
from openwafer.serve.block_pool import BlockPool
from openwafer.serve.core import Engine, EngineStats, Event, FinishReason, QueueFullError, Request, TokenLogprob
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.growth import grow
from openwafer.serve.runner import AheadRunner, FlyingRunner, Runner
from openwafer.serve.scheduler import Scheduler, Work
from openwafer.serve.sequence import Sequence
from openwafer.serve.speculation import Lookup, Speculator

if TYPE_CHECKING:
    from openwafer.serve.pipeline.cluster import Cluster

__all__ = ["EngineConfig", "LocalEngine", "open_engine"]

_log = logging.getLogger(__name__)
_PATIENCE_S = 3.0  # for a step of other processes to end; the server's own patience is a little longer


def open_engine(
    path_or_name: str | Path, config: EngineConfig | None = None, cluster: "Cluster | None" = None
) -> tuple[Engine, Tokenizer | None, ModelConfig]:
    """Load a model (a pulled name, a file or a folder) and start an engine on it.

    `cluster`: the ranks that have its stages, one for each of `num_csx`.
    """
    from openwafer.serve.opening import open_with_speculator

    config = config or EngineConfig()
    stored = open_model(path_or_name)
    runner, speculator = open_with_speculator(stored, config, cluster)
    num_tokens = runner.num_blocks * runner.block_size
    limit = min(stored.config.max_position_embeddings, num_tokens)
    if config.max_context is not None and config.max_context > limit:
        runner.close()
        speculator.close()
        raise UserError(
            f"max_context {config.max_context} is more than the model ({stored.config.max_position_embeddings}) "
            f"or the key/value cache ({num_tokens} tokens) can hold: lower it, or give a larger kv_cache"
        )
    engine = LocalEngine(runner, stored.config, config, max_context=config.max_context or limit, speculator=speculator)
    return engine, stored.tokenizer(), stored.config


class LocalEngine:
    """Decodes requests on one runner, in a thread of its own."""

    def __init__(
        self,
        runner: Runner,
        model: ModelConfig,
        config: EngineConfig,
        *,
        max_context: int,
        speculator: Speculator | None = None,
    ) -> None:
        self.max_context = max_context
        self.vocab_size = model.vocab_size
        self._runner = runner
        self._speculator = speculator or Lookup(in_text=False)
        self._config = config
        pool = BlockPool(runner.num_blocks, runner.block_size, prefix_cache=config.prefix_cache)
        self._stages = runner if isinstance(runner, FlyingRunner) else None
        self._max_in_flight = 1 if self._stages is None else self._stages.max_in_flight
        self._scheduler = Scheduler(
            pool,
            max_running=config.num_running,
            max_step_tokens=config.num_step_tokens,
            num_groups=self._max_in_flight,
        )
        # Guesses need the tokens before them.
        self._guesses = not isinstance(self._speculator, Lookup) or self._speculator.in_text
        self._runs_ahead = isinstance(runner, AheadRunner) and not self._guesses
        self._may_plan = True  # with `_runs_ahead`: before all flights have landed
        if self._runs_ahead:
            self._max_in_flight = 2
        self._order = itertools.count()
        self._wake = threading.Condition()
        # Under the lock: what other threads leave for the engine's thread.
        self._arrived: list[Sequence] = []
        self._cancelled: list[str] = []
        self._is_closing = False
        self._error: str | None = None
        self._num_waiting = 0
        # Of the engine's thread alone.
        self._flights: deque[Flight] = deque()  # the oldest first
        self._by_id: dict[str, Sequence] = {}
        self._num_prompt_tokens = self._num_generated_tokens = self._num_cached_tokens = 0
        self._num_guessed_tokens = self._num_right_tokens = 0
        self._last_progress_s = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        with self._wake:
            if self._is_closing or self._error is not None:
                raise QueueFullError(self._error or "the engine is closing")
            if self._num_waiting >= self._config.max_waiting:
                raise QueueFullError(f"{self._num_waiting} requests are waiting already")
            seed = request.sampling.seed
            self._arrived.append(
                Sequence(
                    request=request,
                    on_event=on_event,
                    seed=secrets.randbits(64) if seed is None else seed,
                    submitted_s=time.monotonic(),
                    order=next(self._order),
                )
            )
            self._num_waiting += 1
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        with self._wake:
            self._cancelled.append(request_id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        pool = self._scheduler.pool
        with self._wake:
            return EngineStats(
                num_running=len(self._scheduler.running),
                num_waiting=self._num_waiting,
                kv_cache_usage=1 - pool.num_free / pool.num_blocks,
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_generated_tokens,
                num_cached_tokens=self._num_cached_tokens,
                num_guessed_tokens=self._num_guessed_tokens,
                num_right_tokens=self._num_right_tokens,
                last_progress_s=self._last_progress_s,
                stage_busy_s=() if self._stages is None else self._stages.busy_s(),
                failure=self._error,
            )

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give way and was computed again."""
        return self._scheduler.num_preemptions

    def close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_S if self._stages is not None else None)
            if self._stages is not None and self._thread.is_alive():
                self._stages.abandon()  # a stage hangs
                self._thread.join()

    def _main(self) -> None:
        """The engine's thread. Whatever ends it, nobody is left waiting for an answer."""
        is_broken, failure = True, "the engine has stopped after an internal error"
        try:
            while self._receive():
                self._step()
            is_broken = False
        except UserError as error:  # a lost stage, a full disk
            failure = str(error)
            _log.error("the engine has stopped: %s", failure)
        finally:
            with self._wake:
                self._error = failure if is_broken else None
                self._is_closing = True
                for sequence in self._arrived:
                    self._scheduler.waiting.push(sequence)
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                self._finish(sequence, "error" if is_broken else "cancelled", self._error)
            self._runner.close()
            self._speculator.close()

    def _receive(self) -> bool:
        """Take in what arrived, waiting for something to do; False when closing."""
        with self._wake:
            while not (self._by_id or self._flights or self._arrived or self._cancelled or self._is_closing):
                self._last_progress_s = time.monotonic()
                self._wake.wait(timeout=1.0)
                if self._stages is not None:
                    self._stages.check()
            if self._is_closing:
                return False
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        for sequence in arrived:
            if reason := self._refusal(sequence.request):
                with self._wake:
                    self._num_waiting -= 1
                self._tell(sequence, Event(finish_reason="error", error=reason, usage=sequence.usage(time.monotonic())))
                continue
            self._by_id[sequence.request.id] = sequence
            self._scheduler.waiting.push(sequence)
        for request_id in cancelled:
            if (sequence := self._by_id.get(request_id)) is not None:
                self._finish(sequence, "cancelled")
        return True

    def _refusal(self, request: Request) -> str | None:
        """Why a request cannot be served at all."""
        if request.id in self._by_id:
            return f"a request with the id {request.id} is under way"
        if not request.prompt:
            return "the prompt is empty: give at least one token"
        if len(request.prompt) >= self.max_context:
            return f"the prompt has {len(request.prompt)} tokens; with its answer it must fit into {self.max_context}"
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.vocab_size:
            return f"the prompt has token ids outside 0..{self.vocab_size - 1}: wrong tokenizer?"
        if any(not 0 <= token < self.vocab_size for token in request.sampling.logit_bias):
            return f"logit_bias has token ids outside 0..{self.vocab_size - 1}"
        return None

    def _step(self) -> None:
        """Send off a group of requests if some can be, and take in the oldest when all stages have work."""
        if self._runs_ahead and self._flights and (self._scheduler.is_short or not self._may_plan):
            self._land()
        self._speculate()
        works = self._scheduler.plan()
        now = time.monotonic()
        num_started = 0
        for work in works:
            if work.sequence.started_s is None:
                work.sequence.started_s = now
                self._num_cached_tokens += work.sequence.num_cached
                num_started += 1
        with self._wake:
            self._num_waiting -= num_started
        if works:
            self._flights.append(Flight(self._runner, works))
            for work in works:
                self._sent(work)
            if self._runs_ahead:
                self._may_plan = go_ahead(self._flights[-1], self.max_context)
        if self._flights and (not works or len(self._flights) >= self._max_in_flight):
            self._land()

    def _land(self) -> None:
        """Take in the oldest flight."""
        flight = self._flights.popleft()
        for work, draws, rows in zip(flight.works, flight.draws, flight.land(), strict=True):
            sequence = work.sequence
            if self._by_id.get(sequence.request.id) is not sequence:
                continue  # it has ended meanwhile
            if not draws or sequence.num_ahead == 0:
                self._after(work, rows)
                continue
            before = step_back(sequence)
            self._after(work, rows)
            if self._by_id.get(sequence.request.id) is sequence:
                catch_up(sequence, *before)
        self._last_progress_s = time.monotonic()

    def _sent(self, work: Work) -> None:
        """Whatever is sent off later finds the keys and values of this work; only its token is to be waited for."""
        sequence = work.sequence
        if work.start < (num_prompt := len(sequence.request.prompt)):
            self._num_prompt_tokens += min(work.stop, num_prompt) - work.start
        sequence.in_flight = work.draws
        if not sequence.in_flight:
            sequence.num_computed = work.stop
            self._scheduler.pool.publish(sequence)

    def _speculate(self) -> None:
        """Guess ahead for the answers under way, as far as the step has room after one token for everybody."""
        if not self._guesses and not any(s.request.prediction for s in self._scheduler.running):
            return
        group = self._scheduler.decoding()[: self._scheduler.group_size]
        decoding = [s for s in group if s.num_drawn + 1 < s.request.sampling.max_tokens]
        if not decoding:
            return
        room = (self._config.num_step_tokens - len(self._scheduler.running)) // len(decoding)
        if (most := min(self._config.num_draft_tokens, room)) < 1:
            return
        for sequence, drafts in zip(decoding, self._speculator.guess(decoding, most), strict=True):
            left = min(
                sequence.request.sampling.max_tokens - sequence.num_drawn, self.max_context - len(sequence.tokens)
            )
            sequence.drafts = [token for token in drafts[: left - 1] if 0 <= token < self.vocab_size]

    def _after(self, work: Work, rows: Rows) -> None:
        """Take the results of a step into account: those of the work's last rows."""
        growth = grow(work, rows, self.max_context)
        if growth is None:
            return
        sequence = work.sequence
        self._num_generated_tokens += len(growth.tokens)
        self._num_guessed_tokens += growth.num_guessed
        self._num_right_tokens += growth.num_right
        self._scheduler.pool.publish(sequence)
        if growth.finish is not None:
            self._forget(sequence)
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        if sequence.request.sampling.prompt_logprobs and sequence.num_drawn == len(growth.tokens):
            prompt_logprobs = tuple(sequence.prompt_logprobs)
        self._tell(
            sequence,
            Event(
                tokens=tuple(growth.tokens),
                logprobs=tuple(growth.logprobs),
                prompt_logprobs=prompt_logprobs,
                finish_reason=growth.finish,
                error=growth.error,
                usage=sequence.usage(time.monotonic()) if growth.finish is not None else None,
            ),
        )

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a request without a token."""
        self._forget(sequence)
        self._tell(sequence, Event(finish_reason=reason, error=error, usage=sequence.usage(time.monotonic())))

    def _forget(self, sequence: Sequence) -> None:
        self._by_id.pop(sequence.request.id, None)
        self._speculator.forget(sequence)
        self._scheduler.finish(sequence)
        if sequence.started_s is None:
            with self._wake:
                self._num_waiting -= 1

    def _tell(self, sequence: Sequence, event: Event) -> None:
        try:
            sequence.on_event(event)
        except Exception:  # noqa: BLE001
            # A listener that is gone must not take the other requests with it.
            _log.exception("request %s: its listener failed", sequence.request.id)
