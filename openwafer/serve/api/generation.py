"""The engine's work on one HTTP request: one or more answers, from submission to the last token."""

import time
from collections.abc import Sequence
from functools import partial

from openwafer.serve.api.answer import Answer, Piece
from openwafer.serve.api.body import Disconnected
from openwafer.serve.api.courier import Courier
from openwafer.serve.api.errors import ApiError, busy, stopping
from openwafer.serve.api.metrics import Metrics
from openwafer.serve.api.served_model import ServedModel
from openwafer.serve.core import Event, QueueFullError, Request, Usage


class Generation:
    """Submit, then `next()` while `is_open`; always `close()`. Used in the event loop's thread."""

    def __init__(
        self,
        served: ServedModel,
        courier: Courier,
        metrics: Metrics,
        requests: Sequence[Request],
        stops: tuple[str, ...],
        *,
        keep_tokens: bool = True,
    ) -> None:
        self._engine = served.engine
        self._courier = courier
        self._metrics = metrics
        self._requests = requests
        self._inbox = courier.inbox()
        self._open: set[int] = set()
        self._is_given_up = False
        self._last_token_at: list[float | None] = [None] * len(requests)
        self.began = time.monotonic()
        self.created = time.time()
        self.first_token_s: float | None = None
        self.answers = [
            Answer(served.vocabulary, stops, partial(self._engine.cancel, request.id), keep_tokens=keep_tokens)
            for request in requests
        ]

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def start(self) -> None:
        """503 when the queue is full, and then nothing of this request is left in it."""
        for index, request in enumerate(self._requests):
            try:
                self._engine.submit(request, partial(self._courier.send, self._inbox, index))
            except QueueFullError:
                self.close()
                raise busy("too many requests are waiting: try again soon", "queue_full") from None
            self._open.add(index)

    async def next(self) -> list[tuple[int, Piece]]:
        """What has come since the last call: (index of the answer, piece)."""
        batch = []
        for index, event in await self._inbox.get():
            if event.tokens:
                self._observe(index, event)
            piece = self.answers[index].push(event)
            if event.finish_reason is not None:
                self._open.discard(index)
                self._check_end(index, piece)
            if piece is not None:
                batch.append((index, piece))
        return batch

    def _observe(self, index: int, event: Event) -> None:
        now = time.monotonic()
        last = self._last_token_at[index]
        self._last_token_at[index] = now
        if last is None:
            if self.first_token_s is None:
                self.first_token_s = now - self.began
            self._metrics.first_token_s.observe(now - self.began)
        else:
            self._metrics.next_token_s.observe((now - last) / len(event.tokens))

    def _check_end(self, index: int, piece: Piece | None) -> None:
        reason = piece.finish_reason if piece is not None else None
        if reason == "error":
            message = self.answers[index].error or "the engine failed on this request"
            raise ApiError(500, message, code="engine_error")
        if reason == "cancelled":
            if self._is_given_up:
                raise Disconnected
            raise stopping()

    def give_up(self) -> None:
        """The client has gone: `next` raises Disconnected once the engine has let go."""
        self._is_given_up = True
        self._cancel_all()

    def close(self) -> None:
        """Nothing of it stays in the engine."""
        self._is_given_up = True
        self._cancel_all()
        self._open.clear()

    def _cancel_all(self) -> None:
        for index in self._open:
            self._engine.cancel(self._requests[index].id)

    def cancel_answer(self, index: int) -> None:
        """This answer is complete as it is; its end is still reported."""
        self.answers[index].end_here()
        self._engine.cancel(self._requests[index].id)

    def usage(self, num_prompt_tokens: int) -> Usage:
        """Of all answers together; times are those of the slowest."""
        parts = [answer.usage or Usage(num_prompt_tokens=0) for answer in self.answers]
        return Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens(),
            num_completion_tokens=sum(answer.num_tokens for answer in self.answers),
            num_accepted_prediction_tokens=sum(part.num_accepted_prediction_tokens for part in parts),
            num_rejected_prediction_tokens=sum(part.num_rejected_prediction_tokens for part in parts),
            queue_s=max(part.queue_s for part in parts),
            prompt_s=max(part.prompt_s for part in parts),
            completion_s=max(part.completion_s for part in parts),
        )

    def _num_cached_tokens(self) -> int:
        """Of each prompt once, as prompt tokens are counted; later answers find the first one's prompt cached."""
        first: dict[int, int] = {}
        for request, answer in zip(self._requests, self.answers, strict=True):
            if answer.usage is not None:
                first.setdefault(id(request.prompt), answer.usage.num_cached_tokens)
        return sum(first.values())
