"""Requests as the API takes them. A field that is not here is a mistake (400), never ignored."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_ANSWERS = 128  # n, best_of, and prompts × n of one request
MAX_STOPS = 4
MAX_BIASES = 1024
MAX_MESSAGES = 10_000
MAX_FIELDS = 100  # of one object, known and unknown

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Model(BaseModel):
    """Strict: no strings for numbers, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        """Each unknown field is a mistake of its own: a million of them take seconds to collect."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "{num} fields are more than there are", {"num": len(value)})
        return value


def _text_only(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") not in (None, "text"):
        kind = repr(str(part["type"])[:40])
        raise PydanticCustomError("text_only", "this server takes text only, not parts of type {kind}", {"kind": kind})
    return part


class TextPart(Model):
    type: Literal["text"]
    text: str


Part = Annotated[TextPart, BeforeValidator(_text_only)]
# Of a long list that is wrong throughout, the first mistake is enough.
Content = str | Annotated[list[Part], Field(fail_fast=True)]


class SystemMessage(Model):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Model):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Model):
    name: str
    arguments: str


class ToolCall(Model):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients that collect streamed deltas send it back


class AssistantMessage(Model):
    """Also what a client got from us or from others and sends back, with the fields that it filled with null."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> "AssistantMessage":
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("empty_message", "an assistant message needs content or tool_calls")
        return self


class ToolMessage(Model):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Function(Model):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    type: Literal["function"]
    function: Function


class NamedFunction(Model):
    name: str


class NamedTool(Model):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(Model):
    type: Literal["text"]


class JsonFormat(Model):
    type: Literal["json_object"]


class JsonSchema(Model):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Model):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(Model):
    include_usage: bool | None = None


class Prediction(Model):
    type: Literal["content"]
    content: Content


def _few(biases: Any) -> Any:
    """Counted first: else each of a million wrong ones is a mistake of its own."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise PydanticCustomError("too_long", "at most {most} tokens can have a bias", {"most": MAX_BIASES})
    return biases


Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), BeforeValidator(_few)
]


class Drawing(Model):
    """What both kinds of completion have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=-1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="extension: draw from the k likeliest; 0 or -1: from all")
    min_p: float | None = Field(None, ge=0, le=1, description="extension: drop tokens below min_p x the likeliest")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    user: str | None = None
    # Labels for whoever keeps requests; nothing is kept here.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "Drawing":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options has a meaning only with stream: true")
        return self


class ChatRequest(Drawing):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=-1)
    min_completion_tokens: int | None = Field(None, ge=0)
    modalities: list[Literal["text"]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _fields_that_need_others(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs has a meaning only with logprobs: true")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise PydanticCustomError("tool_choice", "tool_choice needs tools")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise PydanticCustomError("tools", "two tools have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise PydanticCustomError("tool_choice", "tool_choice names a function that is not among the tools")
        return self


def _prompt_kind(value: Any) -> Any:
    """One clear sentence instead of one complaint for each of the four shapes."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        flat = value if isinstance(value[0], (str, int)) else [i for v in value if isinstance(v, list) for i in v]
        texts = all(isinstance(v, str) for v in value)
        ids = set(map(type, flat)) == {int} and min(flat) >= 0 and max(flat) < 2**31
        nested = all(isinstance(v, list) and v for v in value)
        if texts or (ids and (nested or flat is value)):
            return value
    raise PydanticCustomError("prompt", "prompt must be text, a list of texts, token ids, or a list of token id lists")


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}
Prompt = Annotated[Any, BeforeValidator(_prompt_kind), WithJsonSchema(_PROMPT_SCHEMA)]


class CompletionRequest(Drawing):
    """Body of POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    logprobs: int | None = Field(None, ge=0, le=20)
    return_raw_tokens: bool | None = None

    @model_validator(mode="after")
    def _fields_that_need_others(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise PydanticCustomError("best_of", "best_of must be at least n")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise PydanticCustomError("best_of", "best_of cannot be streamed: the best is known at the end only")
        return self


class TokenizeRequest(Model):
    """Body of POST /tokenize: a text, or a conversation as the model would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Model):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class NewKey(Model):
    """Body of POST /console/keys."""

    name: str = Field(min_length=1, max_length=100)
    requests_per_day: int | None = Field(None, ge=1, lt=2**53)
    tokens_per_minute: int | None = Field(None, ge=1, lt=2**53)
    is_admin: bool | None = None
