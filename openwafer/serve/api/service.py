"""What a running server knows: its model, its clients, its counters. One per process; the routes are in app.py."""

import asyncio
import contextlib
import hmac
import logging
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from openwafer.serve.api.config import ServeConfig
from openwafer.serve.api.courier import Courier
from openwafer.serve.api.errors import ApiError, busy, stopping
from openwafer.serve.api.generation import Generation
from openwafer.serve.api.limits import Client, Clients
from openwafer.serve.api.metrics import Metrics
from openwafer.serve.api.served_model import ServedModel
from openwafer.serve.core import Usage
from openwafer.serve.keys import DayUsage, KeyStore, today

log = logging.getLogger("openwafer.serve")

State = Literal["loading", "ready", "failed", "stopping"]
_FLUSH_EVERY_S = 1.0
_NUM_RECENT = 200


@dataclass(frozen=True, kw_only=True)
class RecentRequest:
    """One finished request, for the console."""

    id: str
    at: float
    key_id: str
    key_name: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    queue_s: float
    first_token_s: float | None
    total_s: float
    finish_reason: str


class Stall:
    """Since when a client has not taken what was sent to it."""

    __slots__ = ("since", "task", "transport")

    def __init__(self, task: asyncio.Task[Any] | None, transport: Any) -> None:
        self.since: float | None = None
        self.task = task
        self.transport = transport

    def begin(self) -> None:
        self.since = time.monotonic()

    def end(self) -> None:
        self.since = None


class Service:
    """`start` inside the event loop; `set_model` when the engine is there."""

    def __init__(self, config: ServeConfig, store: KeyStore, model_names: tuple[str, ...]) -> None:
        self.config = config
        self.store = store
        self.model_names = model_names
        self.metrics = Metrics(model_names[0])
        self.courier: Courier
        self.clients = Clients(store)
        self.state: State = "loading"
        self.failure = ""
        self.is_public = False  # set by the server: other machines can reach it
        self.served: ServedModel | None = None
        self.recent: deque[RecentRequest] = deque(maxlen=_NUM_RECENT)
        self._pending: dict[tuple[str, str, str], DayUsage] = {}
        self._stalls: set[Stall] = set()
        self._housekeeper: asyncio.Task[None] | None = None
        # Whoever gives the key on the command line owns the server.
        self._owner = Client(id="owner", name="--api_key", is_admin=True)
        self._local = Client(id="local", name="without key", is_admin=True)

    # Life

    def start(self) -> None:
        self.courier = Courier(asyncio.get_running_loop())
        self._housekeeper = asyncio.create_task(self._keep_house())

    def set_model(self, served: ServedModel) -> None:
        self.served = served
        self.metrics.watch(served.engine.stats)
        if self.state == "loading":  # it may have been told to stop meanwhile
            self.state = "ready"

    async def stop(self) -> None:
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._housekeeper
        await asyncio.to_thread(self._flush)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_EVERY_S)
            self._drop_stalled()
            try:
                await asyncio.to_thread(self._flush)
            except sqlite3.Error as error:
                log.error("usage could not be written", extra={"fields": {"error": str(error)}})

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        if pending:
            self.store.add_usage(pending.values())
            self.store.save_buckets(self.clients.levels())

    def _drop_stalled(self) -> None:
        now = time.monotonic()
        for stall in list(self._stalls):
            if stall.since is not None and now - stall.since > self.config.stall_timeout_s:
                log.warning("a client stopped reading its stream and was dropped")
                self._stalls.discard(stall)
                if stall.transport is not None:
                    stall.transport.abort()
                elif stall.task is not None:
                    stall.task.cancel()

    @contextlib.asynccontextmanager
    async def watched(self, scope: Mapping[str, Any]) -> AsyncIterator[Stall]:
        """A stall detector for the stream that the block writes."""
        stall = Stall(asyncio.current_task(), scope.get("openwafer.transport"))
        self._stalls.add(stall)
        try:
            yield stall
        finally:
            self._stalls.discard(stall)

    # Who asks

    @property
    def needs_key(self) -> bool:
        # A server that others can reach stays closed when its last key is revoked.
        return self.is_public or self.config.api_key is not None or self.store.has_keys()

    def client(self, authorization: str) -> Client:
        """Whoever has this Authorization header; 401 for a key that is not ours."""
        if not self.needs_key:
            return self._local
        scheme, _, secret = authorization.partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            raise ApiError(401, "an API key is needed: send it as `Authorization: Bearer KEY`", code="missing_api_key")
        own = self.config.api_key
        if own is not None and hmac.compare_digest(secret.encode("utf-8", "replace"), own.encode("utf-8", "replace")):
            return self._owner
        key = self.store.find(secret)
        if key is None:
            raise ApiError(401, "this API key is not valid, or it was revoked")
        return self.clients.of_key(key)

    # What is served

    def model(self, name: str | None) -> ServedModel:
        """404 for a name that is not served, 503 while nothing is."""
        if name is not None and name not in self.model_names:
            known = ", ".join(self.model_names)
            shown = name[:100]
            raise ApiError(404, f"there is no model {shown!r} here: {known}", param="model", code="model_not_found")
        if self.served is None or self.state != "ready":
            if self.state == "failed":
                raise ApiError(500, f"the model cannot be served: {self.failure}", code="model_failed")
            if self.state == "stopping":
                raise stopping()
            raise busy("the model is being loaded", "loading", retry_after_s=2)
        return self.served

    def health(self) -> tuple[int, dict[str, Any]]:
        """503 while loading, when the engine broke, and when there is work but no step has ended for long."""
        if self.served is None or self.state in ("loading", "failed"):
            return 503, {"status": self.state, **({"error": self.failure} if self.state == "failed" else {})}
        stats = self.served.engine.stats()
        idle_s = time.monotonic() - stats.last_progress_s
        has_work = stats.num_running + stats.num_waiting > 0
        report = {"num_running": stats.num_running, "num_waiting": stats.num_waiting}
        if self.state == "stopping":
            return 503, {"status": "stopping", **report}
        if stats.failure is not None:
            return 503, {"status": "failed", "error": stats.failure}
        if has_work and idle_s > self.config.hang_timeout_s:
            return 503, {"status": "hung", "seconds_without_progress": round(idle_s, 1), **report}
        return 200, {"status": "ok", **report}

    # What was done

    def book(
        self, client: Client, model: str, request_id: str, usage: Usage, reasons: list[str], generation: Generation
    ) -> None:
        total_s = time.monotonic() - generation.began
        for reason in reasons:
            self.metrics.count(reason)
        self.metrics.request_s.observe(total_s)
        place = (client.id, model, today())
        booked = self._pending.get(place) or DayUsage(
            key_id=client.id, model=model, day=place[2], requests=0, prompt_tokens=0, completion_tokens=0
        )
        self._pending[place] = replace(
            booked,
            requests=booked.requests + 1,
            prompt_tokens=booked.prompt_tokens + usage.num_prompt_tokens,
            completion_tokens=booked.completion_tokens + usage.num_completion_tokens,
        )
        self.recent.append(
            RecentRequest(
                id=request_id,
                at=generation.created,
                key_id=client.id,
                key_name=client.name,
                model=model,
                prompt_tokens=usage.num_prompt_tokens,
                completion_tokens=usage.num_completion_tokens,
                queue_s=usage.queue_s,
                first_token_s=generation.first_token_s,
                total_s=total_s,
                finish_reason=reasons[0],
            )
        )

    def usage_rows(self, since_day: str) -> Iterator[DayUsage]:
        """What is stored and what is about to be."""
        yield from self.store.usage(since_day)
        yield from list(self._pending.values())
