"""Tool calls in text: the same calls however the text is cut into pieces."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.serve.api.tools import FORMATS, CallArguments, CallBegin, Text, ToolReader, format_of_template

NAMES = frozenset({"f", "g"})
Calls = list[tuple[str, str]]


def read(style: str, text: str, cuts: list[int], *, is_parallel: bool = True) -> tuple[str, Calls, bool]:
    """(text, calls as (name, arguments), whether there were calls) of `text` cut at `cuts`."""
    reader = ToolReader(FORMATS[style], NAMES, is_parallel=is_parallel)
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    deltas = [d for start, end in itertools.pairwise(bounds) for d in reader.push(text[start:end])]
    deltas += reader.finish()
    calls: dict[int, tuple[str, str]] = {}
    said = ""
    for delta in deltas:
        if isinstance(delta, Text):
            said += delta.text
        elif isinstance(delta, CallBegin):
            assert delta.index == len(calls)
            calls[delta.index] = (delta.name, "")
        else:
            assert isinstance(delta, CallArguments)
            assert delta.index == len(calls) - 1  # one call after the other
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.text)
    return said, list(calls.values()), reader.has_calls


CASES = {
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>'): (
        "",
        [("f", '{"a": "}\\"{"}')],
    ),
    ("hermes", '<tool_call>{"arguments": {"x":1}, "name":"g"}</tool_call>'): ("", [("g", '{"x":1}')]),
    ("hermes", 'I see. <tool_call>{"name":"f"}</tool_call> \n bye'): ("I see. bye", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"nobody","arguments":{}}</tool_call> z'): (
        '<tool_call>{"name":"nobody","arguments":{}}</tool_call> z',
        [],
    ),
    ("hermes", "a < b <tool_ <tool_call>no json</tool_call>"): ("a < b <tool_ <tool_call>no json</tool_call>", []),
    ("hermes", '{"name":"f"}'): ('{"name":"f"}', []),
    ("hermes", "ends in <tool"): ("ends in <tool", []),
    ("hermes", '<tool_call>{"na'): ('<tool_call>{"na', []),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1'): ("", [("f", '{"a":1')]),
    ("hermes", "  \n "): ("  \n ", []),
    ("hermes", "\n\nHello"): ("\n\nHello", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'): (
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("llama3_json", '[{"name":"f","parameters":{"q":null}},{"name":"g","parameters":"{\\"a\\":1}"}]'): (
        "",
        [("f", '{"q":null}'), ("g", '{"a":1}')],
    ),
    ("llama3_json", '<|python_tag|>{"name":"f","parameters":{}}'): ("", [("f", "{}")]),
    ("llama3_json", '{"answer": 42}'): ('{"answer": 42}', []),
    ("llama3_json", 'Hello {"name":"f"}'): ('Hello {"name":"f"}', []),
    ("generic", '```json\n{"name":"f","arguments":{"a":1}}\n```'): ("", [("f", '{"a":1}')]),
    ("generic", 'So:\n```json\n{"x":1}\n```\nok'): ('So:\n```json\n{"x":1}\n```\nok', []),
    ("generic", '{"name":"f","arguments":null}'): ("", [("f", "{}")]),
    ("generic", '{"name": 5}'): ('{"name": 5}', []),
    ("generic", "[x] a task"): ("[x] a task", []),
    ("generic", "[1, 2]"): ("[1, 2]", []),
}


@pytest.mark.parametrize(("given_", "wanted"), CASES.items())
def test_cases_in_any_pieces(given_: tuple[str, str], wanted: tuple[str, Calls]):
    style, text = given_
    for step in (1, 2, 3, 7, len(text)):
        said, calls, has_calls = read(style, text, list(range(0, len(text), step)))
        assert (said, calls) == wanted
        assert has_calls == bool(calls)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["hermes", "llama3_json", "generic"]),
    st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.integers(), max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.integers(0, 999), max_size=20),
)
def test_what_a_format_writes_it_reads(style: str, wanted: list[tuple[str, dict]], cuts: list[int]):
    chosen = FORMATS[style]
    text = chosen.between.join(chosen.write(name, json.dumps(arguments)) for name, arguments in wanted)
    said, calls, _ = read(style, text, cuts)
    assert said == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == wanted


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["hermes", "llama3_json", "generic"]),
    st.text(alphabet='<>{}[]"`tol_cajsn: ,'),
    st.lists(st.integers(0, 99), max_size=9),
)
def test_text_without_calls_is_kept(style: str, text: str, cuts: list[int]):
    said, calls, _ = read(style, text, cuts)
    assert (said, calls) == (text, [])


def test_one_call_when_not_parallel():
    text = 2 * '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert read("hermes", text, [], is_parallel=False) == ("", [("f", "{}")], True)


def test_arguments_are_passed_on_at_once():
    reader = ToolReader(FORMATS["hermes"], NAMES)
    assert reader.push('<tool_call>{"name": "f", "argu')[0].name == "f"  # pyright: ignore
    assert reader.push('ments": {"a": "x') == [CallArguments(0, '{"a": "x')]
    assert reader.push("yz") == [CallArguments(0, "yz")]


def test_format_of_template():
    assert format_of_template("{{ tools }} <tool_call>").name == "hermes"
    assert format_of_template("{{ tools }} <|python_tag|>").name == "llama3_json"
    assert format_of_template("{{ messages }}").name == "generic"
    assert format_of_template(None).name == "generic"
