"""Answers that must have a form: JSON, a JSON schema, forced tool calls. llguidance says which tokens may follow.

White space between JSON tokens is one space, or a line break and an indentation: a model that is not allowed
to end cannot go on with white space for ever.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer

from openwafer.models.tokenizer import Tokenizer
from openwafer.serve.api.errors import ApiError
from openwafer.serve.api.json_schema import unsupported
from openwafer.serve.api.tools import ToolFormat

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ ]|\n[ ]{0,16}",
    "lenient": False,
}
_CACHE_SIZE = 64


class MatcherConstraint:
    """core.Constraint over one llguidance matcher."""

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes

    def allowed(self) -> bytes | None:
        return self._matcher.compute_bitmask()[: self._num_bytes]

    def advance(self, token: int) -> None:
        # A token that was not allowed puts the matcher into an error state, which counts as done.
        self._matcher.consume_token(token)

    @property
    def is_done(self) -> bool:
        return self._matcher.is_stopped()


class GrammarCompiler:
    """Constraints for one vocabulary. Slow to make (half a second for 50,000 tokens), quick to use; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        # Ids beyond the tokenizer's are padding of the embedding, which must never be drawn.
        self._num_bytes = (vocab_size + 7) // 8
        eos_ids = list(tokenizer.eos_ids)
        if not eos_ids:
            raise ApiError(400, "this model has no token that ends an answer, so an answer's form cannot be forced")
        size = max(vocab_size, tokenizer.vocab_size)
        self._tokenizer = LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=eos_ids)
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def any_json(self) -> MatcherConstraint:
        return self.schema({"type": "object"}, "response_format")

    def schema(self, schema: Mapping[str, Any], param: str) -> MatcherConstraint:
        """400 names the keyword that is not supported."""
        check_schema(schema, param)
        return self._constraint(LLMatcher.grammar_from_json_schema(dict(schema), overrides=_JSON_OPTIONS), param)

    def calls(
        self,
        style: ToolFormat,
        functions: Iterable[tuple[str, Mapping[str, Any]]],
        *,
        is_parallel: bool,
        is_forced: bool,
        answer: Mapping[str, Any] | None = None,
    ) -> MatcherConstraint:
        """Calls of (name, schema of the arguments). Where they are not forced, text may stand around them, or
        instead of them there is an `answer` of that schema.
        """
        functions = list(functions)
        if answer is not None:
            check_schema(answer, "response_format")
            if not style.before:
                return self.schema(_call_or_answer(style, functions, answer), "response_format")
        return self._constraint(_lark(style, functions, is_parallel, is_forced, answer), "tools")

    def _constraint(self, grammar: str, param: str) -> MatcherConstraint:
        with self._lock:
            matcher = self._matchers.get(grammar)
            if matcher is not None:
                self._matchers.move_to_end(grammar)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise ApiError(400, f"{param}: {_sentence(matcher.get_error())}", param=param, code="invalid_schema")
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_stopped():  # a schema that refers to itself and to nothing else
                raise ApiError(400, f"{param}: no value can satisfy it", param=param, code="invalid_schema")
            with self._lock:
                self._matchers[grammar] = matcher
                while len(self._matchers) > _CACHE_SIZE:
                    self._matchers.popitem(last=False)
        return MatcherConstraint(matcher.deep_copy(), self._num_bytes)


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """400 for a keyword that would have to be ignored, or for a schema that can hold no value."""
    if problem := unsupported(schema):
        raise ApiError(400, f"{param}: {problem}", param=param, code="unsupported_schema_keyword")


def is_supported(schema: Mapping[str, Any]) -> bool:
    """Whether a schema can be enforced."""
    if unsupported(schema):
        return False
    grammar = LLMatcher.grammar_from_json_schema(dict(schema), overrides=_JSON_OPTIONS)
    is_error, _ = LLMatcher.validate_grammar_with_warnings(grammar)
    return not is_error


def _lark(
    style: ToolFormat,
    functions: list[tuple[str, Mapping[str, Any]]],
    is_parallel: bool,
    is_forced: bool,
    answer: Mapping[str, Any] | None,
) -> str:
    """One rule for each function; its schema stands alone, so that its references hold."""
    lines = []
    for number, (name, schema) in enumerate(functions):
        lines.append(f"call_{number}: {json.dumps(style.begin(name))} args_{number} {json.dumps(style.end)}")
        lines.append(f"args_{number}: {_json_rule(schema)}")
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    more = f"({json.dumps(style.between)} call)*" if is_parallel else ""
    if answer is not None:
        lines.append(f"answer: {_json_rule(answer)}")
        lines.append(f"start: call {more} | answer")
    elif is_forced:
        lines.append(f"start: call {more}")
    elif not style.before:
        # What begins with a bracket is a call, and nothing else is.
        lines.append(f"start: call {more} | TEXT")
        lines.append(r"TEXT: /([^{\[](.|\n)*)?/")
    else:
        # Free text up to the first mark; from there on only calls.
        trigger = style.before
        first = " | ".join(f"rest_{number}" for number in range(len(functions)))
        for number, (name, _) in enumerate(functions):
            rest = style.begin(name).removeprefix(trigger)
            lines.append(f"rest_{number}: {json.dumps(rest)} args_{number} {json.dumps(style.end)}")
        lines.append(f"opened[lazy]: TEXT {json.dumps(trigger)}")
        lines.append(f"start: TEXT | opened ({first}) {more}")
        lines.append(r"TEXT: /(.|\n)*/")
    return "%llguidance {}\n" + "\n".join(lines)


def _call_or_answer(
    style: ToolFormat, functions: list[tuple[str, Mapping[str, Any]]], answer: Mapping[str, Any]
) -> dict[str, Any]:
    """One schema for both: where no mark opens a call, both begin with the same brace."""
    if any('"$ref"' in json.dumps(schema) for schema in (answer, *(schema for _, schema in functions))):
        raise ApiError(
            400,
            "response_format: with tools of this model, schemas must not have $ref (calls and answers look alike)",
            param="response_format",
            code="unsupported_schema_keyword",
        )
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, style.arguments: schema},
            "required": ["name", style.arguments],
            "additionalProperties": False,
        }
        for name, schema in functions
    ]
    return {"anyOf": [*calls, answer]}


def _json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS})


def _sentence(error: str) -> str:
    return " ".join(error.split())[:300]
