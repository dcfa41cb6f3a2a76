"""Tools and JSON through the two real clients: every format, every choice, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import cerebras.cloud.sdk as vendor
import openai
import pytest

from openwafer.serve.api.tools import FORMATS, ToolFormat
from tests.serve.script_server import Running, running, say

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": CITY}}
    for name in ("weather", "trains")
]
NAMED = {"type": "function", "function": {"name": "trains"}}
BERN, CHUR = ("weather", {"city": "Bern"}), ("trains", {"city": 'Chur "alt" {ü}'})
Call = tuple[str, dict[str, str]]
Served = tuple[Running, ToolFormat]


@pytest.fixture(scope="module", params=FORMATS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for each way to write calls."""
    with running(tmp_path_factory.mktemp("tools"), tool_call_parser=request.param) as server:
        yield server, FORMATS[request.param]


@pytest.fixture(scope="module", params=["openai", "vendor"])
def client(request: pytest.FixtureRequest, served: Served) -> Iterator[Any]:
    url = served[0].url
    if request.param == "openai":
        made: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    else:
        made = vendor.Cerebras(base_url=url, api_key="any", max_retries=0)
    with made:
        yield made


def answer(client: Any, stream: bool, text: str, **fields: Any) -> tuple[str, list[Call], str]:
    """Text, calls and finish reason, put together as users of a client do."""
    created = client.chat.completions.create(model="script", messages=say(text), stream=stream, **fields)
    if not stream:
        (choice,) = created.choices
        calls = [call.function for call in choice.message.tool_calls or ()]
        found = [(call.name, json.loads(call.arguments)) for call in calls]
        return choice.message.content or "", found, choice.finish_reason
    content, reason, parts = "", None, {}
    for chunk in created:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for delta in choice.delta.tool_calls or ():
                part = parts.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
                part["id"] += delta.id or ""
                part["name"] += delta.function.name or ""
                part["arguments"] += delta.function.arguments or ""
    assert list(parts) == list(range(len(parts)))
    assert len({part["id"] for part in parts.values()}) == len(parts)
    return content, [(part["name"], json.loads(part["arguments"])) for part in parts.values()], str(reason)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "written", "read"),
    [
        ({}, [BERN], [BERN]),
        ({"tool_choice": "auto"}, [BERN, CHUR], [BERN, CHUR]),
        ({"tool_choice": "required"}, [BERN, CHUR], [BERN, CHUR]),
        ({"tool_choice": NAMED}, [CHUR, BERN], [CHUR]),
        ({"parallel_tool_calls": False}, [CHUR, BERN], [CHUR]),
        ({"parallel_tool_calls": False, "tool_choice": "required"}, [CHUR, BERN], [CHUR]),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_calls(client: Any, served: Served, stream: bool, fields: Any, written: list[Call], read: list[Call]) -> None:
    style = served[1]
    text = style.between.join(style.write(name, json.dumps(given, ensure_ascii=False)) for name, given in written)
    assert answer(client, stream, text, tools=TOOLS, **fields) == ("", read, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_no_call(client: Any, stream: bool) -> None:
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        assert answer(client, stream, "It rains.", **fields) == ("It rains.", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_json(client: Any, stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    for form in (schema, {"type": "json_object"}):
        content, calls, reason = answer(client, stream, '{"city": "Bern"}', response_format=form)
        assert (json.loads(content), calls, reason) == ({"city": "Bern"}, [], "stop")
