"""Constraints: what they let through, what they do not, and what they refuse to promise."""

import json
import time
from typing import Any

import pytest

from openwafer.serve.api.errors import ApiError
from openwafer.serve.api.grammar import GrammarCompiler, MatcherConstraint, is_supported
from openwafer.serve.api.tools import FORMATS
from tests.serve.script_server import EOS, TOKENIZER

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "object", "properties": {"t": {"type": "boolean"}}, "required": ["t"]}},
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size + 5)


def takes(constraint: MatcherConstraint, text: str) -> tuple[bool, bool]:
    """(whether every token was allowed, whether the answer may end there)."""
    for token in TOKENIZER.encode(text):
        mask = constraint.allowed()
        assert mask is not None
        assert len(mask) == (TOKENIZER.vocab_size + 5 + 7) // 8
        if not mask[token // 8] >> (token % 8) & 1:
            return False, False
        constraint.advance(token)
    mask = constraint.allowed()
    assert mask is not None
    return True, constraint.is_done or bool(mask[EOS // 8] >> (EOS % 8) & 1)


@pytest.mark.parametrize(
    ("value", "is_legal"),
    [
        ({"name": "Grün", "kind": "a"}, True),
        ({"name": "x", "kind": "b", "tags": [{"t": True}], "either": None}, True),
        ({"name": "x", "kind": "c"}, False),
        ({"name": "much too long", "kind": "a"}, False),
        ({"kind": "a"}, False),
        ({"name": "x", "kind": "a", "more": 1}, False),
        ({"name": "x", "kind": "a", "tags": [{"t": 1}]}, False),
    ],
)
def test_schema(compiler: GrammarCompiler, value: Any, is_legal: bool):
    text = json.dumps(value, ensure_ascii=False)
    assert takes(compiler.schema(PERSON, "response_format"), text) == (is_legal, is_legal)


def test_done_when_nothing_can_follow(compiler: GrammarCompiler):
    constraint = compiler.schema(PERSON, "response_format")
    takes(constraint, '{"name": "x", "kind": "a"')
    assert not constraint.is_done
    takes(constraint, "}")
    assert constraint.is_done


def test_padding_ids_are_never_allowed(compiler: GrammarCompiler):
    mask = compiler.any_json().allowed()
    assert mask is not None
    for token in range(TOKENIZER.vocab_size, TOKENIZER.vocab_size + 5):
        assert not mask[token // 8] >> (token % 8) & 1


@pytest.mark.parametrize("text", ["[1]", "3", " {}", "{  }", '{"a":\n\n1}', "{}\n"])
def test_json_mode_is_an_object_without_padding(compiler: GrammarCompiler, text: str):
    assert takes(compiler.any_json(), text)[0] is False
    assert takes(compiler.any_json(), '{\n  "a": [1, {"b": null}]\n}') == (True, True)


@pytest.mark.parametrize("style", FORMATS.values(), ids=FORMATS)
def test_forced_calls(compiler: GrammarCompiler, style):
    functions = [("f", PERSON), ("g", {"type": "object"})]
    one = style.write("f", '{"name": "x", "kind": "a"}')
    two = style.between.join([one, style.write("g", "{}")])
    wrong = style.write("f", '{"name": 1}')

    def forced(is_parallel: bool) -> MatcherConstraint:
        return compiler.calls(style, functions, is_parallel=is_parallel, is_forced=True)

    assert takes(forced(True), one) == (True, True)
    assert takes(forced(True), two) == (True, True)
    assert takes(forced(False), one) == (True, True)
    assert takes(forced(False), two)[0] is False
    assert takes(forced(True), wrong)[0] is False
    assert takes(forced(True), "Hello")[0] is False
    assert takes(forced(True), style.write("h", "{}"))[0] is False


@pytest.mark.parametrize("style", FORMATS.values(), ids=FORMATS)
def test_strict_calls_that_are_not_forced(compiler: GrammarCompiler, style):
    def free() -> MatcherConstraint:
        return compiler.calls(style, [("f", PERSON)], is_parallel=True, is_forced=False)

    assert takes(free(), "Just words.") == (True, True)
    before = "Wait. " if style.before else ""
    assert takes(free(), before + style.write("f", '{"name": "x", "kind": "a"}')) == (True, True)
    assert takes(free(), before + style.write("f", '{"name": 1}'))[0] is False


@pytest.mark.parametrize("style", FORMATS.values(), ids=FORMATS)
def test_calls_or_an_answer_of_a_form(compiler: GrammarCompiler, style):
    def either() -> MatcherConstraint:
        functions = [("f", {"type": "object"})]
        return compiler.calls(style, functions, is_parallel=True, is_forced=False, answer=answer)

    answer = {**PERSON, "properties": {**PERSON["properties"], "tags": {}}, "$defs": {}}
    assert takes(either(), '{"name": "x", "kind": "a"}') == (True, True)
    assert takes(either(), style.write("f", '{"any": 1}')) == (True, True)
    assert takes(either(), '{"name": "x", "kind": "c"}')[0] is False
    assert takes(either(), "Hello")[0] is False
    answer = PERSON
    if style.before:
        assert takes(either(), '{"name": "x", "kind": "a", "tags": [{"t": true}]}') == (True, True)
    else:
        with pytest.raises(ApiError, match=r"must not have \$ref"):
            either()


def test_unsupported(compiler: GrammarCompiler):
    for schema, word in [
        ({"type": "object", "properties": {"a": {"allOf": [{"contains": {}}]}}}, "contains"),
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "object", "properties": 3}, "properties"),
        ({"anyOf": {}}, "anyOf"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "string", "pattern": "(?=x)"}, "look-around"),
        ({"items": 5}, "items"),
    ]:
        assert not is_supported(schema)
        with pytest.raises(ApiError, match=word):
            compiler.schema(schema, "response_format")
    assert is_supported(PERSON)
    for endless in (
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ):
        with pytest.raises(ApiError, match="no value can satisfy it"):
            compiler.schema(endless, "response_format")


def test_costly_schemas_are_compiled_in_bounded_time(compiler: GrammarCompiler):
    """Compared with a plain one: thousands of values may take thousands of times as long, not for ever."""
    began = time.perf_counter()
    for schema in (
        {"type": "array", "minItems": 100_000, "items": {"type": "integer"}},
        {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
        {"type": "string", "maxLength": 10**7},
        {"enum": [f"value {number}" for number in range(5000)]},
    ):
        compiler.schema(schema, "response_format").allowed()
    assert time.perf_counter() - began < 30  # hours without the library's limits
