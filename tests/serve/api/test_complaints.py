"""What users of such servers complain about: one test for each."""

import gc
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from openwafer.serve.api.generation import Generation
from tests.serve.script_engine import ScriptEngine
from tests.serve.script_server import TOKENIZER, Running, running, said, say

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("first", "second")
]
TWO_CALLS = (
    'I will look.\n<tool_call>\n{"name": "first", "arguments": {"a": "x}y"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "second", "arguments": {"a": [1, 2]}}\n</tool_call>'
)


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_tool_call_deltas_have_the_right_shape(api: Running):
    chunks = chunks_of(api.chat(say(TWO_CALLS), tools=TOOLS, stream=True))
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    for index, (name, arguments) in enumerate([("first", {"a": "x}y"}), ("second", {"a": [1, 2]})]):
        mine = [delta for delta in deltas if delta["index"] == index]
        assert mine[0]["id"].startswith("call_")
        assert (mine[0]["type"], mine[0]["function"]["name"]) == ("function", name)
        assert all(set(delta) == {"index", "function"} for delta in mine[1:])
        assert all(set(delta["function"]) == {"arguments"} for delta in mine[1:])
        assert json.loads("".join(delta["function"]["arguments"] for delta in mine)) == arguments
    assert [delta["index"] for delta in deltas] == sorted(delta["index"] for delta in deltas)
    assert text_of(chunks) == "I will look.\n"


def test_tool_arguments_come_as_they_are_written(tmp_path: Path):
    """Not buffered to the end: a fragment is here while the engine still writes."""
    call = '<tool_call>{"name": "first", "arguments": {"a": "' + "x" * 40 + '"}}</tool_call>'
    engine = ScriptEngine(said, vocab_size=TOKENIZER.vocab_size, step_s=0.005)
    with running(tmp_path, engine) as server:
        body = {"model": "script", "messages": say(call), "tools": TOOLS, "stream": True}
        early = False
        with server.stream("/v1/chat/completions", body) as response:
            for line in response.iter_lines():
                if '"arguments":"x' in line and engine.stats().num_running:
                    early = True
        assert early


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        ("plain", {}, "stop"),
        ("plain", {"max_tokens": 2}, "length"),
        (TWO_CALLS, {"tools": TOOLS}, "tool_calls"),
        (TWO_CALLS, {"tools": TOOLS, "max_tokens": 60}, "length"),
        ("no call", {"tools": TOOLS}, "stop"),
        ('{"a":1}', {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "first"}}}, "tool_calls"),
        (TWO_CALLS, {"tools": TOOLS, "parallel_tool_calls": False}, "tool_calls"),
        (TWO_CALLS, {"tools": TOOLS, "tool_choice": "none"}, "stop"),
    ],
)
def test_finish_reason_is_right(api: Running, text: str, fields: dict[str, Any], reason: str, stream: bool):
    script = api.engine.script
    if isinstance(fields.get("tool_choice"), dict):
        # A named tool forces the beginning of the call; the model only writes the arguments.
        forced = '<tool_call>\n{"name": "first", "arguments": ' + text + "}\n</tool_call>"
        api.engine.script = lambda request: TOKENIZER.encode(forced) + [1]
    try:
        response = api.chat(say(text), stream=stream, **fields)
    finally:
        api.engine.script = script
    if stream:
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks_of(response)]
        assert reasons == [None] * (len(reasons) - 1) + [reason]
        return
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == reason
    num_calls = {"tool_calls": 1 if "parallel_tool_calls" in fields or "tool_choice" in fields else 2}.get(reason, 0)
    if reason != "length":
        assert len(choice["message"].get("tool_calls", [])) == num_calls
    assert choice["message"].get("tool_calls") != []


def test_tools_and_a_response_format_together(api: Running):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    answer = api.chat(say('{"a": 1}'), tools=TOOLS, response_format=wanted).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ('{"a": 1}', "stop")
    call = '<tool_call>\n{"name": "first", "arguments": {"a": 1}}\n</tool_call>'
    answer = api.chat(say(call), tools=TOOLS, response_format=wanted).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "first"


def test_named_tool_is_called_once(api: Running):
    script = api.engine.script
    call = '<tool_call>\n{"name": "first", "arguments": {}}\n</tool_call>'
    api.engine.script = lambda request: TOKENIZER.encode("\n".join([call] * 3)) + [1]
    try:
        choice = {"type": "function", "function": {"name": "first"}}
        answer = api.chat(say("x"), tools=TOOLS, tool_choice=choice).json()["choices"][0]
    finally:
        api.engine.script = script
    assert (len(answer["message"]["tool_calls"]), answer["finish_reason"]) == (1, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("say END now", "END", "say "),
        ("the EN and the END", "END", "the EN and the "),  # EN is one token, and begins the stop string
        ("a EENEND b", ["zzz", "END"], "a EEN"),
        ("ab", ["b"], "a"),  # ab is one token
        ("grün", "ü", "gr"),  # ü is two tokens
        ("only EN", "END", "only EN"),
        ("x", "x", ""),
    ],
)
def test_stop_string_across_tokens_never_leaks(api: Running, text: str, stop: Any, shown: str, stream: bool):
    # The marker of the prompt would contain END itself.
    script = api.engine.script
    api.engine.script = lambda request: TOKENIZER.encode(text) + [1]
    try:
        response = api.chat([{"role": "user", "content": "go"}], stop=stop, stream=stream)
    finally:
        api.engine.script = script
    if stream:
        chunks = chunks_of(response)
        assert text_of(chunks) == shown
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (shown, "stop")
    api.wait_idle()


def test_characters_are_not_split_across_chunks(api: Running):
    text = "aé漢😀👩‍👩‍👧z"
    chunks = chunks_of(api.chat(say(text), stream=True))
    assert text_of(chunks) == text
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


def test_cut_character_is_never_shown(api: Running):
    choice = api.chat(say("a😀"), max_tokens=3).json()["choices"][0]
    assert choice["message"]["content"] == "a"
    assert choice["finish_reason"] == "length"


def test_usage_in_streams(api: Running):
    chunks = chunks_of(api.chat(say("abc"), stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chunks[-2]["usage"]
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    chunks = chunks_of(api.chat(say("abc"), stream=True))
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[-1]["time_info"]["completion_time"] > 0
    assert not any("usage" in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_its_place(tmp_path: Path, stream: bool):
    engine = ScriptEngine(lambda _: [40] * 4000, vocab_size=TOKENIZER.vocab_size, step_s=0.01)
    with running(tmp_path, engine) as server:
        body = json.dumps({"model": "script", "messages": say("x"), "stream": stream, "n": 3}).encode()
        with socket.create_connection(server.server.address) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            deadline = time.monotonic() + 60
            while engine.stats().num_running < 3:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        server.wait_idle()
        assert engine.stats().num_generated_tokens < 3 * 4000
        metrics = server.get("/metrics").text
        assert 'finished_reason="cancelled",model_name="script"} 1.0' in metrics


def test_seed_reaches_the_engine_whoever_else_asks(api: Running):
    api.engine.submitted.clear()
    api.chat(say("x"), seed=7, n=2)
    api.chat(say("x"), seed=-1)
    api.chat(say("x"))
    seeds = [request.sampling.seed for request in api.engine.submitted]
    assert seeds == [7, 8, 2**63 - 1, None]


def test_no_endless_white_space_in_json_mode(api: Running):
    """A model that would write nothing but spaces is made to write JSON."""
    script = api.engine.script
    api.engine.script = lambda request: TOKENIZER.encode('{"a":' + " " * 50 + "1" + " " * 50 + "}")
    try:
        answer = api.chat(say("x"), response_format={"type": "json_object"}, max_tokens=60).json()
        api.engine.script = lambda request: TOKENIZER.encode("\n" * 60)
        lines = api.chat(say("x"), response_format={"type": "json_object"}, max_tokens=60).json()
    finally:
        api.engine.script = script
    # Spaces inside strings are text, and the model's own business.
    outside = re.sub(r'"[^"]*"?', '""', answer["choices"][0]["message"]["content"])
    assert outside.startswith('{"": ')
    assert "  " not in outside
    assert not lines["choices"][0]["message"]["content"].startswith("\n")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"type": "object", "properties": {"a": {"type": "string", "minLenght": 2}}}, "minLenght"),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "string", "format": "moon-phase"}, "moon-phase"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    ],
)
def test_schema_keywords_are_not_ignored(api: Running, schema: dict[str, Any], keyword: str):
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    response = api.chat(say("x"), response_format=wanted)
    assert response.status_code == 400
    error = response.json()["error"]
    assert keyword in error["message"]
    assert error["param"] == "response_format"
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    response = api.chat(say("x"), tools=tools, tool_choice="required")
    assert response.status_code == 400
    assert keyword in response.json()["error"]["message"]


def test_streamed_logprobs_are_those_of_the_whole_answer(api: Running):
    fields = {"logprobs": True, "top_logprobs": 2, "stop": "STOP"}
    text = "grün the ENab"
    whole = api.chat(say(text + "STOP"), **fields).json()["choices"][0]
    chunks = chunks_of(api.chat(say(text + "STOP"), stream=True, **fields))
    streamed = [
        entry for chunk in chunks for entry in (chunk["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert streamed == whole["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in streamed).decode() == text
    assert all(len(entry["top_logprobs"]) == 2 for entry in streamed)
    # Each chunk has the logprobs of its own text.
    for chunk in chunks:
        choice = chunk["choices"][0]
        spelled = b"".join(bytes(entry["bytes"]) for entry in (choice.get("logprobs") or {"content": []})["content"])
        assert spelled.decode() == (choice["delta"].get("content") or "")


@pytest.mark.parametrize("stream", [False, True])
def test_over_long_prompt_is_a_400(api: Running, stream: bool):
    response = api.chat(say("x" * 5000), stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]
    body = {"model": "script", "prompt": [5] * 4096, "stream": stream}
    assert api.post("/v1/completions", body).json()["error"]["code"] == "context_length_exceeded"


def test_content_null_and_string_arguments_do_not_break_templates(api: Running):
    call = {"id": "c1", "type": "function", "function": {"name": "first", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "first", "arguments": "not json"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        *say("ok"),
    ]
    assert api.chat(turns, tools=TOOLS).json()["choices"][0]["message"]["content"] == "ok"
    prompt = TOKENIZER.decode(api.engine.submitted[-1].prompt, skip_special=False)
    assert "user\none\ntwo<|im_end|>" in prompt
    assert '<tool_call>first({"a": 1})</tool_call>' in prompt  # an object, not a string with quotes in it
    assert "None" not in prompt


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Running]:
    engine = ScriptEngine(lambda _: [40] * 50, vocab_size=TOKENIZER.vocab_size, step_s=0.02)
    with running(tmp_path, engine, hang_timeout_s=1) as server:
        yield server


def test_health_while_loading_busy_and_hung(slow: Running, tmp_path: Path):
    assert slow.get("/health").status_code == 200
    body = {"model": "script", "messages": say("x"), "stream": True}
    with slow.stream("/v1/chat/completions", body) as response:
        lines = response.iter_lines()
        next(lines)
        busy = slow.get("/health")
        assert (busy.status_code, busy.json()["num_running"]) == (200, 1)
        slow.engine.is_hung = True
        deadline = time.monotonic() + 60
        while slow.get("/health").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert slow.get("/health").json()["status"] == "hung"
        slow.engine.is_hung = False
        assert list(lines)[-2] == "data: [DONE]"
    assert slow.get("/health").status_code == 200


def test_health_says_that_the_engine_is_dead_and_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    with running(tmp_path) as server:
        server.engine.failure = "stage 2 of 2 was lost"
        assert server.service.health() == (503, {"status": "failed", "error": "stage 2 of 2 was lost"})
        deadline = time.monotonic() + 60
        while not ended:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert str(ended[0].exc_value) == "stage 2 of 2 was lost"


def test_health_says_loading(tmp_path: Path):
    gate = threading.Event()
    with running(tmp_path, gate=gate) as server:
        response = server.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        answer = server.chat(say("x"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        assert answer.headers["retry-after"]
        assert server.get("/v1/tcp_warming").status_code == 200
        gate.set()
        deadline = time.monotonic() + 60
        while server.get("/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.chat(say("x")).status_code == 200


def test_memory_does_not_grow_with_requests(api: Running):
    """Nothing of a finished request is kept but its line in the bounded list of recent ones."""
    for _ in range(30):
        api.chat(say("x"))
        api.chat(say("x"), stream=True)
    api.chat([], stream=True)
    api.engine.submitted.clear()
    gc.collect()
    assert sum(type(thing) is Generation for thing in gc.get_objects()) <= 2
    assert api.service.recent.maxlen is not None
