"""The part that both kinds of completion share: plan, admit, run, answer whole or as a stream, settle."""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from starlette.responses import Response

from openwafer.serve.api.answer import Piece
from openwafer.serve.api.body import Disconnected, Receive
from openwafer.serve.api.errors import ApiError
from openwafer.serve.api.generation import Generation
from openwafer.serve.api.limits import Client
from openwafer.serve.api.schema import Drawing
from openwafer.serve.api.served_model import ServedModel
from openwafer.serve.api.wire import DONE, Envelope, time_json, to_event, to_json, usage_json
from openwafer.serve.core import Request, Usage

if TYPE_CHECKING:
    from openwafer.serve.api.service import Service

R = TypeVar("R", bound=Drawing)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the engine will be asked."""

    requests: list[Request]
    stops: tuple[str, ...]
    num_prompt_tokens: int
    keep_tokens: bool = True
    is_length_asked: bool = False  # by the client; else answers are as long as fits

    @property
    def max_tokens(self) -> int:
        """The most that the request can cost."""
        return self.num_prompt_tokens + sum(request.sampling.max_tokens for request in self.requests)


class Job(ABC, Generic[R]):
    """One request from plan to settlement. Subclasses say what choices and chunks look like."""

    kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(
        self,
        service: "Service",
        served: ServedModel,
        client: Client,
        request: R,
        request_id: str,
        user_agent: str = "",
    ) -> None:
        self.service = service
        self.served = served
        self.client = client
        self.request = request
        self.request_id = request_id
        self.user_agent = user_agent
        self.envelope = Envelope(
            served,
            self.kind + (".chunk" if request.stream and self.kind == "chat.completion" else ""),
            self.prefix,
            request_id,
            request.service_tier,
        )
        self.wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        self.plan: Plan
        self.generation: Generation
        self._taken = 0
        self._is_settled = False

    # What subclasses write.

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def add(self, index: int, piece: Piece) -> None:
        """Collect a piece for the whole response."""
        ...

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    def finish_reasons(self) -> list[str]: ...

    @abstractmethod
    def chunks(self, index: int, piece: Piece) -> list[bytes]:
        """What a piece adds to the stream."""
        ...

    @abstractmethod
    def finish_chunk(self, index: int, **more: Any) -> bytes: ...

    # What is the same for all.

    def start(self, plan: Plan) -> None:
        """Admit the request and hand it to the engine; 429 or 503 when it cannot be taken."""
        self.plan = plan
        self._taken = self.client.take_tokens(plan.max_tokens, is_upper_bound=not plan.is_length_asked)
        self.generation = Generation(
            self.served,
            self.service.courier,
            self.service.metrics,
            plan.requests,
            plan.stops,
            keep_tokens=plan.keep_tokens,
        )
        self.begin()
        try:
            self.generation.start()
        except ApiError:
            self.client.settle(self._taken, 0)
            raise

    def usage(self) -> Usage:
        return self.generation.usage(self.plan.num_prompt_tokens)

    def _totals(self) -> dict[str, Any]:
        usage, generation = self.usage(), self.generation
        times = time_json(usage, generation.created, time.monotonic() - generation.began)
        return {"usage": usage_json(usage), "time_info": times}

    def settle(self, reasons: list[str]) -> None:
        """Book what was used; once."""
        self.generation.close()
        if self._is_settled:
            return
        self._is_settled = True
        usage = self.usage()
        self.client.settle(self._taken, usage.num_prompt_tokens + usage.num_completion_tokens)
        self.service.book(self.client, self.served.name, self.request_id, usage, reasons, self.generation)

    async def whole(self, receive: Receive) -> Response:
        """The response when everything is written."""
        reasons = ["cancelled"]
        try:
            async with gives_up(self.generation, receive):
                while self.generation.is_open:
                    for index, piece in await self.generation.next():
                        self.add(index, piece)
            body = self.envelope.body(self.choices(), **self._totals())
            reasons = self.finish_reasons()
            return Response(to_json(body), media_type="application/json")
        except ApiError:
            reasons = ["error"]
            raise
        finally:
            self.settle(reasons)

    async def first(self, receive: Receive) -> "StreamResponse":
        """A stream whose first piece is there, so that whatever failed before has its own status."""
        try:
            async with gives_up(self.generation, receive):
                batch = await self.generation.next()
                while not batch:
                    batch = await self.generation.next()
        except BaseException as error:
            self.settle(["error" if isinstance(error, ApiError) else "cancelled"])
            raise
        return StreamResponse(self, batch)

    def write(self, batch: list[tuple[int, Piece]]) -> bytes:
        """The chunks of a batch; usage and times go with the very last."""
        out: list[bytes] = []
        for index, piece in batch:
            out += self.chunks(index, piece)
            if piece.finish_reason is not None:
                is_last = not self.generation.is_open and piece is batch[-1][1]
                out.append(self.finish_chunk(index, **self._totals() if is_last else {}))
        return b"".join(out)

    def end(self) -> bytes:
        """What comes after the last choice."""
        if self.wants_usage:
            return to_event(self.envelope.body([], **self._totals())) + DONE
        return DONE


class StreamResponse(Response):
    """Server-sent events, written straight to the connection."""

    def __init__(self, job: Job, batch: list[tuple[int, Piece]]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._job = job
        self._batch = batch

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Any) -> None:
        job, generation = self._job, self._job.generation
        reasons = ["cancelled"]
        try:
            async with gives_up(generation, receive), job.service.watched(scope) as stall:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                batch = self._batch
                while True:
                    data = job.write(batch)
                    if not generation.is_open:
                        break
                    stall.begin()
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                    stall.end()
                    batch = await generation.next()
                data += job.end()
                job.settle(job.finish_reasons())  # booked before the client knows that it is over
                await send({"type": "http.response.body", "body": data, "more_body": False})
        except Disconnected:
            pass
        except ApiError as error:
            reasons = ["error"]
            body = to_event({**error.as_json(), "status_code": error.status}) + DONE
            await send({"type": "http.response.body", "body": body, "more_body": False})
        finally:
            job.settle(reasons)


@contextlib.asynccontextmanager
async def gives_up(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """While the block runs, a client that disconnects takes its request out of the engine."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.give_up()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
