"""The end of a server: what runs is finished, what comes is told, over real sockets."""

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.script_engine import ScriptEngine
from tests.serve.script_server import TOKENIZER, Running, running, say

CHAT = "/v1/chat/completions"
BODY = {"model": "script", "messages": say("x"), "stream": True}


@contextlib.contextmanager
def stopping(folder: Path, num_tokens: int, **settings: float) -> Iterator[tuple[Running, Iterator[str]]]:
    """A server that was told to stop, and the lines of the answer that it is still writing. Its engine stands still
    until `is_hung` is False.
    """
    engine = ScriptEngine(lambda _: [40] * num_tokens, vocab_size=TOKENIZER.vocab_size, step_s=0.02)
    with running(folder, engine, **settings) as server:
        assert server.get("/health").status_code == 200  # and this connection is kept
        with server.stream(CHAT, BODY) as response:
            lines = response.iter_lines()
            next(lines)
            engine.is_hung = True
            server.server.should_exit = True
            deadline = time.monotonic() + 60
            while server.service.state != "stopping":
                assert time.monotonic() < deadline
                time.sleep(0.005)
            yield server, lines


def test_new_requests_are_told_and_the_running_one_is_finished(tmp_path: Path) -> None:
    with stopping(tmp_path, num_tokens=30) as (server, lines):
        kept = server.post(CHAT, {**BODY, "stream": False})
        large = {**BODY, "messages": say("x" * 2_000_000)}
        for refused in (kept, httpx.post(f"{server.url}{CHAT}", json=large), httpx.get(f"{server.url}/v1/models")):
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("service_unavailable_error", "stopping")
            assert "shutting down" in error["message"]
            assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("5", "true")
            assert refused.headers["connection"] == "close"  # the next connection may lead to another server
            assert refused.headers["x-request-id"]
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "stopping", "num_running": 1, "num_waiting": 0})
        assert "openwafer:num_requests_running" in httpx.get(f"{server.url}/metrics").text
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        with client, pytest.raises(openai.InternalServerError, match="shutting down") as raised:
            client.completions.create(model="script", prompt="x")
        assert raised.value.status_code == 503
        address = server.server.address
        server.engine.is_hung = False
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert chunks[-1]["usage"]["completion_tokens"] == 30
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        # Nothing is left to do: nobody is let in any more.
        deadline = time.monotonic() + 60
        while not _is_refused(address):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert len(server.engine.submitted) == 1


def _is_refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionError:
        return True
    return False


def test_who_is_not_done_in_time_is_told(tmp_path: Path) -> None:
    with stopping(tmp_path, num_tokens=3000, shutdown_timeout_s=0.3) as (server, lines):
        server.engine.is_hung = False
        began = time.monotonic()
        *_, last, done = [line for line in lines if line]
        assert time.monotonic() - began < 30  # the answer would take a minute
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
    assert done == "data: [DONE]"
    assert not server.engine.stats().num_running


def test_requests_that_keep_coming_do_not_keep_the_server(tmp_path: Path) -> None:
    """Neither do connections on which nothing is asked."""
    with stopping(tmp_path, num_tokens=25) as (server, lines):
        idle = socket.create_connection(server.server.address)
        server.engine.is_hung = False
        began, statuses = time.monotonic(), set()
        with contextlib.suppress(httpx.TransportError):
            while time.monotonic() - began < 60:
                statuses.add(httpx.get(f"{server.url}/v1/models").status_code)
        assert statuses == {503}
        assert time.monotonic() - began < 20
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert idle.recv(1) == b""
        idle.close()


def test_who_has_not_sent_its_request_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
    with stopping(tmp_path, num_tokens=3) as (server, lines):
        server.server.config.timeout_graceful_shutdown = 1
        with socket.create_connection(server.server.address) as client:
            client.sendall(head.encode() + b"half")
            server.engine.is_hung = False
            assert [line for line in lines if line][-1] == "data: [DONE]"
            answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "stopping"
    assert "Traceback" not in caplog.text


def test_a_second_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    with stopping(tmp_path, num_tokens=3000) as (server, lines):
        address = server.server.address
        server.engine.is_hung = False
        began = time.monotonic()
        server.server.handle_exit(signal.SIGINT, None)
        with contextlib.suppress(httpx.TransportError):
            assert "stopping" in "".join(lines)
        deadline = began + 20  # the answer would take a minute, and could have half of it
        while not _is_refused(address):
            assert time.monotonic() < deadline
            time.sleep(0.02)
