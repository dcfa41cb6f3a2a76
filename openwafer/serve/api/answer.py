"""One answer being written: the engine's events on one side, text with logprobs on the other."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from openwafer.serve.api.stop import StopFinder
from openwafer.serve.api.vocabulary import Vocabulary
from openwafer.serve.core import Event, FinishReason, TokenLogprob, Usage


@dataclass(slots=True)
class Piece:
    """The next part of an answer. The last one has a `finish_reason`."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)  # those that the text is made of
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)  # of those tokens, when asked for
    finish_reason: FinishReason | None = None


class Answer:
    """Turns the events of one request into pieces.

    `on_stop` is called when a stop string was found: the engine need not go on. Without `keep_tokens` what
    the engine writes is dropped (a request for no tokens at all still has to be made for one).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: tuple[str, ...],
        on_stop: Callable[[], None],
        *,
        keep_tokens: bool = True,
    ) -> None:
        self._to_text = vocabulary.text_stream()
        self._finder = StopFinder(stops)
        self._on_stop = on_stop
        self._keep_tokens = keep_tokens
        self._length = 0  # characters decoded
        self._shown = 0  # characters given out
        self._waiting: deque[tuple[int, int, TokenLogprob | None]] = deque()  # (start, token, logprob)
        self._found_stop = False
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.num_tokens = 0
        self.usage: Usage | None = None
        self.error: str | None = None
        self.sum_logprob = 0.0

    def end_here(self) -> None:
        """Whatever still comes is not wanted; the end counts as `stop`."""
        self._found_stop = True
        self._waiting.clear()

    def push(self, event: Event) -> Piece | None:
        """What the event adds to the answer; None when nothing is to be shown yet."""
        piece = Piece()
        if event.prompt_logprobs:
            self.prompt_logprobs = event.prompt_logprobs
        if event.tokens and not self._found_stop and self._keep_tokens:
            self._take(event.tokens, event.logprobs, piece)
        if event.finish_reason is not None:
            self._finish(event, piece)
        elif not piece.text and not piece.tokens:
            return None
        return piece

    def _take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], piece: Piece) -> None:
        for number, token in enumerate(tokens):
            logprob = logprobs[number] if logprobs else None
            self.num_tokens += 1
            if logprob is not None:
                self.sum_logprob += logprob.logprob
            new = self._to_text(token)
            self._waiting.append((self._length, token, logprob))
            self._length += len(new)
            shown, self._found_stop = self._finder.push(new)
            piece.text += shown
            self._shown += len(shown)
            if self._found_stop:
                self._release(piece, self._shown)
                self._waiting.clear()
                self._on_stop()
                return
        self._release(piece, self._shown)

    def _release(self, piece: Piece, shown: int) -> None:
        """Tokens that began before the last character shown belong to what was shown."""
        waiting = self._waiting
        while waiting and waiting[0][0] < shown:
            _, token, logprob = waiting.popleft()
            piece.tokens.append(token)
            if logprob is not None:
                piece.logprobs.append((token, logprob))

    def _finish(self, event: Event, piece: Piece) -> None:
        self.usage = event.usage
        self.error = event.error
        piece.finish_reason = event.finish_reason
        if self._found_stop or not self._keep_tokens:
            if event.finish_reason != "error":
                piece.finish_reason = "stop" if self._found_stop else "length"
            return
        piece.text += self._finder.flush()
        self._release(piece, self._length + 1)
