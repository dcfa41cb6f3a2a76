"""POST /v1/completions: continue texts or tokens."""

from typing import Any

from openwafer.errors import UserError
from openwafer.serve.api.answer import Piece
from openwafer.serve.api.errors import ApiError
from openwafer.serve.api.job import Job, Plan
from openwafer.serve.api.sampling import asked_tokens, sampling, stops
from openwafer.serve.api.schema import MAX_ANSWERS, CompletionRequest
from openwafer.serve.api.served_model import ServedModel
from openwafer.serve.api.wire import LegacyLogprobs, text_chunk, to_event
from openwafer.serve.core import Request, TokenLogprob


def plan_completion(served: ServedModel, request: CompletionRequest, request_id: str, client: str) -> Plan:
    """One engine request for each prompt and answer: all answers of the first prompt, then of the second."""
    prompts = [tuple(ids) for ids in _prompts(served, request)]
    num_drawn = request.best_of or request.n or 1
    if len(prompts) * num_drawn > MAX_ANSWERS:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with {num_drawn} answers each are more than {MAX_ANSWERS}: send several requests",
            param="prompt",
            code="too_many_answers",
        )
    num_logprobs = request.logprobs
    if num_logprobs is None and num_drawn > (request.n or 1):
        num_logprobs = 0  # to find the best
    with_prompt = bool(request.echo) and request.logprobs is not None
    requests = [
        Request(
            id=f"{request_id}-{number}-{index}",
            prompt=prompt,
            sampling=sampling(
                served, request, len(prompt), index=index, num_logprobs=num_logprobs, prompt_logprobs=with_prompt
            ),
            client=client,
        )
        for number, prompt in enumerate(prompts)
        for index in range(num_drawn)
    ]
    return Plan(
        requests=requests,
        stops=stops(request),
        num_prompt_tokens=sum(map(len, prompts)),
        keep_tokens=asked_tokens(request) != 0,
        is_length_asked=asked_tokens(request) is not None,
    )


def _prompts(served: ServedModel, request: CompletionRequest) -> list[list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [_encode(served, prompt)]
    if isinstance(prompt[0], str):
        return [_encode(served, text) for text in prompt]
    lists = prompt if isinstance(prompt[0], list) else [prompt]
    for ids in lists:
        if max(ids) >= served.engine.vocab_size:
            raise ApiError(
                400,
                f"prompt: {max(ids)} is not a token id of this model (0 to {served.engine.vocab_size - 1})",
                param="prompt",
                code="invalid_value",
            )
    return lists


def _encode(served: ServedModel, text: str) -> list[int]:
    try:
        return served.tokenizer.encode(text, add_special=True)
    except UserError as error:
        raise ApiError(400, str(error), param="prompt") from None


class _Choice:
    """One answer being collected."""

    def __init__(self, served: ServedModel) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[tuple[int, TokenLogprob]] = []
        self.finish_reason: str | None = None
        self.legacy = LegacyLogprobs(served.vocabulary)
        self.has_echoed = False


class CompletionJob(Job[CompletionRequest]):
    """One request on its way; `Job` runs it."""

    kind = "text_completion"
    prefix = "cmpl"

    def begin(self) -> None:
        self._choices = [_Choice(self.served) for _ in self.plan.requests]
        more = ',"usage":null' if self.wants_usage else ""
        self._around = [self.envelope.around_text(index, "text", "", "", more) for index in range(len(self._choices))]

    def add(self, index: int, piece: Piece) -> None:
        choice = self._choices[index]
        choice.text.append(piece.text)
        choice.tokens += piece.tokens
        choice.logprobs += piece.logprobs
        choice.finish_reason = piece.finish_reason or choice.finish_reason

    def choices(self) -> list[dict[str, Any]]:
        chosen = self._best()
        return [self._json(number, index) for number, index in enumerate(chosen)]

    def _best(self) -> list[int]:
        """The `n` likeliest of each prompt's `best_of` answers, per token, the best first."""
        num_kept, num_drawn = self.request.n or 1, self.request.best_of or self.request.n or 1
        chosen = []
        for first in range(0, len(self._choices), num_drawn):
            group = range(first, first + num_drawn)
            if num_drawn > num_kept:
                group = sorted(group, key=self._mean_logprob, reverse=True)[:num_kept]
            chosen += group
        return chosen

    def _mean_logprob(self, index: int) -> float:
        answer = self.generation.answers[index]
        return answer.sum_logprob / max(answer.num_tokens, 1)

    def _json(self, number: int, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        echoed, entries, ids = self._echo(index)
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = choice.legacy.of([*entries, *choice.logprobs])
        value = {
            "index": number,
            "text": echoed + "".join(choice.text),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        if self.request.return_raw_tokens:
            value["tokens"] = [*ids, *choice.tokens]
        return value

    def _echo(self, index: int) -> tuple[str, list[tuple[int, TokenLogprob | None]], list[int]]:
        """The prompt's text, logprobs and tokens when it was asked for, and only once."""
        choice = self._choices[index]
        if not self.request.echo or choice.has_echoed:
            return "", [], []
        choice.has_echoed = True
        prompt = self.plan.requests[index].prompt
        known = self.generation.answers[index].prompt_logprobs
        entries: list[tuple[int, TokenLogprob | None]] = list(zip(prompt, known, strict=False))
        return self.served.tokenizer.decode(prompt), entries, list(prompt)

    def finish_reasons(self) -> list[str]:
        return [choice.finish_reason or "error" for choice in self._choices]

    def chunks(self, index: int, piece: Piece) -> list[bytes]:
        choice, request = self._choices[index], self.request
        choice.finish_reason = piece.finish_reason or choice.finish_reason
        echoed, entries, ids = self._echo(index)
        text = echoed + piece.text
        if request.logprobs is None and not request.return_raw_tokens:
            return [text_chunk(self._around[index], text)] if text else []
        more = {"tokens": [*ids, *piece.tokens]} if request.return_raw_tokens else {}
        logprobs = None
        if request.logprobs is not None:
            logprobs = choice.legacy.of([*entries, *piece.logprobs])
        if not text and not piece.tokens:
            return []
        return [self._chunk(index, text, logprobs, None, more)]

    def finish_chunk(self, index: int, **more: Any) -> bytes:
        return self._chunk(index, "", None, self._choices[index].finish_reason, {}, **more)

    def _chunk(
        self, index: int, text: str, logprobs: Any, finish_reason: str | None, extra: dict[str, Any], **more: Any
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, **extra}
        if self.wants_usage:
            more = {"usage": None, **more}
        return to_event(self.envelope.body([choice], **more))
