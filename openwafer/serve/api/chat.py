"""POST /v1/chat/completions: from a conversation to one or more answers, whole or streamed."""

from collections.abc import Mapping
from typing import Any

from openwafer.errors import UserError
from openwafer.serve.api.answer import Piece
from openwafer.serve.api.conversation import plain_text, render
from openwafer.serve.api.errors import ApiError
from openwafer.serve.api.grammar import check_schema, is_supported
from openwafer.serve.api.job import Job, Plan
from openwafer.serve.api.sampling import asked_tokens, sampling, stops
from openwafer.serve.api.schema import ChatRequest, JsonFormat, JsonSchemaFormat, NamedTool, Tool
from openwafer.serve.api.served_model import ServedModel
from openwafer.serve.api.tools import CallArguments, CallBegin, Delta, Text, ToolReader
from openwafer.serve.api.wire import chat_logprobs, text_chunk, to_event
from openwafer.serve.core import Constraint, Request

_ANY_OBJECT = {"type": "object"}


def plan_chat(served: ServedModel, request: ChatRequest, request_id: str, client: str) -> Plan:
    """Everything that takes time before the engine starts; runs in a worker thread."""
    tools = request.tools if request.tools and request.tool_choice != "none" else []
    variables: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        variables = {
            "reasoning_effort": request.reasoning_effort,
            "enable_thinking": request.reasoning_effort != "none",
        }
    text = render(served, request.messages, tools, **variables)
    prompt = tuple(_encode(served, text))
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    prediction = ()
    if request.prediction is not None:
        prediction = tuple(_encode(served, plain_text(request.prediction.content)))
    requests = [
        Request(
            id=f"{request_id}-{index}",
            prompt=prompt,
            sampling=sampling(served, request, len(prompt), index=index, num_logprobs=num_logprobs),
            constraint=_constraint(served, request, tools),
            prediction=prediction,
            client=client,
        )
        for index in range(request.n or 1)
    ]
    return Plan(
        requests=requests,
        stops=stops(request),
        num_prompt_tokens=len(prompt),
        keep_tokens=asked_tokens(request) != 0,
        is_length_asked=asked_tokens(request) is not None,
    )


def _encode(served: ServedModel, text: str) -> list[int]:
    try:
        return served.tokenizer.encode(text)
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from None


def _constraint(served: ServedModel, request: ChatRequest, tools: list[Tool]) -> Constraint | None:
    """What the answer must look like: forced calls, or calls or an answer of a form, or either with free text."""
    if isinstance(request.tool_choice, NamedTool):
        wanted = request.tool_choice.function.name
        return _calls(served, [tool for tool in tools if tool.function.name == wanted], request, is_forced=True)
    if tools and request.tool_choice == "required":
        return _calls(served, tools, request, is_forced=True)
    answer = None
    if isinstance(request.response_format, JsonSchemaFormat):
        answer = request.response_format.json_schema.schema_
    elif isinstance(request.response_format, JsonFormat):
        answer = _ANY_OBJECT
    if tools and (answer is not None or any(tool.function.strict for tool in tools)):
        return _calls(served, tools, request, is_forced=False, answer=answer)
    return None if answer is None else served.grammars.schema(answer, "response_format")


def _calls(
    served: ServedModel,
    tools: list[Tool],
    request: ChatRequest,
    *,
    is_forced: bool,
    answer: Mapping[str, Any] | None = None,
) -> Constraint:
    functions = [(tool.function.name, _arguments_schema(tool)) for tool in tools]
    return served.grammars.calls(
        served.tool_format, functions, is_parallel=_is_parallel(request), is_forced=is_forced, answer=answer
    )


def _is_parallel(request: ChatRequest) -> bool:
    """A named function is called once."""
    return request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)


def _arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """Strict: a schema that cannot be enforced is refused. Otherwise such arguments are any object."""
    schema = tool.function.parameters or _ANY_OBJECT
    if tool.function.strict:
        check_schema(schema, f"tools: {tool.function.name}")
        return schema
    return schema if is_supported(schema) else _ANY_OBJECT


class _Choice:
    """One answer: its text and its tool calls."""

    def __init__(self, reader: ToolReader | None) -> None:
        self.reader = reader
        self.text: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    def deltas(self, piece: Piece) -> list[Delta]:
        """What a piece adds; sets `finish_reason` with the last."""
        if self.reader is None:
            deltas: list[Delta] = [Text(piece.text)] if piece.text else []
        else:
            deltas = self.reader.push(piece.text)
            if piece.finish_reason is not None:
                deltas += self.reader.finish()
        if piece.finish_reason is not None:
            has_calls = self.reader is not None and self.reader.has_calls
            self.finish_reason = "tool_calls" if has_calls and piece.finish_reason == "stop" else piece.finish_reason
        return deltas

    def collect(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Text):
                self.text.append(delta.text)
            elif isinstance(delta, CallBegin):
                function = {"name": delta.name, "arguments": ""}
                self.calls.append({"id": delta.id, "type": "function", "function": function})
            else:
                self.calls[delta.index]["function"]["arguments"] += delta.text

    def message(self) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.calls:
            message["tool_calls"] = self.calls
            message["content"] = text or None
        return message


class ChatJob(Job[ChatRequest]):
    """One request on its way; `Job` runs it."""

    kind = "chat.completion"
    prefix = "chatcmpl"

    @property
    def _common(self) -> dict[str, str]:
        """What every delta of a call has. The vendor's client reads only those with a type; others put the types of
        all deltas together as they do with arguments, and get "functionfunction".
        """
        return {"type": "function"} if "Cerebras/" in self.user_agent else {}

    def begin(self) -> None:
        request, served = self.request, self.served
        names = frozenset(tool.function.name for tool in request.tools or ())
        has_tools = bool(names) and request.tool_choice != "none"
        is_parallel = _is_parallel(request)
        self._choices = [
            _Choice(ToolReader(served.tool_format, names, is_parallel=is_parallel) if has_tools else None)
            for _ in self.plan.requests
        ]
        self._has_role = [False] * len(self._choices)
        before, more = '"delta":{', ',"usage":null' if self.wants_usage else ""
        self._around = [
            self.envelope.around_text(index, "content", before, "}", more) for index in range(len(self._choices))
        ]

    def add(self, index: int, piece: Piece) -> None:
        choice = self._choices[index]
        choice.collect(choice.deltas(piece))
        if self.request.logprobs:
            choice.logprobs += chat_logprobs(self.served.vocabulary, piece.logprobs)
        self._end_early(index)

    def _end_early(self, index: int) -> None:
        """One call was wanted and it is there: the rest is not."""
        reader = self._choices[index].reader
        if reader is not None and reader.is_done and self._choices[index].finish_reason is None:
            self.generation.cancel_answer(index)

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self.request.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]

    def finish_reasons(self) -> list[str]:
        return [choice.finish_reason or "error" for choice in self._choices]

    def chunks(self, index: int, piece: Piece) -> list[bytes]:
        choice, out = self._choices[index], []
        if not self._has_role[index]:
            self._has_role[index] = True
            out.append(self._chunk(index, {"role": "assistant", "content": ""}))
        deltas = choice.deltas(piece)
        if self.request.logprobs:
            entries = chat_logprobs(self.served.vocabulary, piece.logprobs)
            out += self._with_logprobs(index, deltas, entries)
        else:
            for delta in deltas:
                if isinstance(delta, Text):
                    out.append(text_chunk(self._around[index], delta.text))
                else:
                    out.append(self._chunk(index, self._delta_json(delta)))
        self._end_early(index)
        return out

    def _with_logprobs(self, index: int, deltas: list[Delta], entries: list[dict[str, Any]]) -> list[bytes]:
        """The logprobs of a piece travel with its first delta, so that none is lost or said twice."""
        objects = [self._delta_json(delta) for delta in deltas] or ([{"content": ""}] if entries else [])
        out = []
        for delta in objects:
            out.append(self._chunk(index, delta, {"content": entries, "refusal": None} if entries else None))
            entries = []
        return out

    def finish_chunk(self, index: int, **more: Any) -> bytes:
        return self._chunk(index, {}, None, self._choices[index].finish_reason, **more)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None, **more: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.wants_usage:
            more = {"usage": None, **more}
        return to_event(self.envelope.body([choice], **more))

    def _delta_json(self, delta: Delta) -> dict[str, Any]:
        """Id, type and name once for each call, then its arguments in fragments; the index always."""
        if isinstance(delta, Text):
            return {"content": delta.text}
        if isinstance(delta, CallArguments):
            return {"tool_calls": [{"index": delta.index, **self._common, "function": {"arguments": delta.text}}]}
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
