"""Bad input and bad manners: refused, bounded, and the server goes on."""

import collections
import concurrent.futures
import contextlib
import gzip
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from openwafer.serve.api.logs import JsonFormatter, TextFormatter
from openwafer.serve.core import Event
from tests.serve.script_engine import ScriptEngine
from tests.serve.script_server import TOKENIZER, Running, running, say

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "script", "messages": say("x"), **fields}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, checked to have the one shape that errors have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.headers["x-ratelimit-limit-requests-day"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    return error


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with tight limits."""
    engine = ScriptEngine(
        lambda _: [40] * 3000, vocab_size=TOKENIZER.vocab_size, max_running=2, max_waiting=3, step_s=0.002
    )
    limits = {"max_body_size": 20_000, "body_timeout_s": 0.5, "stall_timeout_s": 0.5}
    with running(tmp_path_factory.mktemp("small"), engine, **limits) as server:
        yield server


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'"text"', 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "invalid_json"),
        (b'{"model": "\xff\xfe"}', 400, "invalid_json"),
        (b'{"model": "script", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_json"),
        (b'{"temperature": NaN}', 400, "invalid_json"),
        (b'{"n": 1e999}', 400, None),
        (json.dumps(body_of(n=10**9)).encode(), 400, "invalid_value"),
        (json.dumps(body_of(n=0)).encode(), 400, "invalid_value"),
        (json.dumps(body_of(max_tokens=10**15)).encode(), 400, "context_length_exceeded"),
        (json.dumps(body_of(max_tokens=-2)).encode(), 400, "invalid_value"),
        (json.dumps(body_of(max_completion_tokens=2**70)).encode(), 400, "context_length_exceeded"),
        (json.dumps(body_of(logit_bias={"99999999": 1})).encode(), 400, "invalid_value"),
        (json.dumps(body_of(logit_bias={"-1": 1})).encode(), 400, "invalid_value"),
        (json.dumps(body_of(logit_bias={"٣": 1})).encode(), 400, "invalid_value"),
        (json.dumps(body_of(logit_bias={"1": 101})).encode(), 400, "invalid_value"),
        (json.dumps(body_of(stop=["a"] * 5)).encode(), 400, "invalid_value"),
        (json.dumps(body_of(stop="")).encode(), 400, "invalid_value"),
        (json.dumps(body_of(seed=2**64)).encode(), 400, "invalid_value"),
        (json.dumps(body_of(surprise=1)).encode(), 400, "unknown_field"),
        (json.dumps(body_of(**{f"f{i}": 1 for i in range(200)})).encode(), 400, "invalid_value"),
        (json.dumps(body_of(messages=say("x") * 10_001)).encode(), 400, "invalid_value"),
        (json.dumps(body_of(logit_bias={str(i): 1 for i in range(1025)})).encode(), 400, "invalid_value"),
        (json.dumps(body_of(temperature="1")).encode(), 400, "invalid_value"),
        (json.dumps(body_of(model="../../../etc/passwd")).encode(), 404, "model_not_found"),
        (json.dumps(body_of(model="script\x00")).encode(), 404, "model_not_found"),
        (json.dumps(body_of(messages=[{"role": "user", "content": [{"type": "image_url"}]}])).encode(), 400, None),
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_bad_bodies(api: Running, content: bytes, status: int, code: str | None):
    error = error_of(api.http.post(CHAT, content=content, headers=JSON), status)
    assert code is None or error["code"] == code
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], [[1], 2], [True], [-1], [10**6], {"a": 1}, 5, None, ["a"] * 200, [[1, 2], []]]
)
def test_bad_prompts(api: Running, prompt: Any):
    error_of(api.post("/v1/completions", {"model": "script", "prompt": prompt}), 400)


def test_image_parts_say_text_only(api: Running):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    error = error_of(api.chat([{"role": "user", "content": [part]}]), 400)
    assert "text only" in error["message"]
    assert error["param"] == "messages.0.content.0"


def test_templates_do_not_run_what_users_write(api: Running):
    attack = "{{ 7 * 7 }}{% for x in ().__class__.__bases__[0].__subclasses__() %}{{ x }}{% endfor %}"
    turns = [{"role": "user", "content": attack, "name": "{{ 1/0 }}"}, *say("ok")]
    assert api.chat(turns).status_code == 200
    assert attack in TOKENIZER.decode(api.engine.submitted[-1].prompt)
    tool = {"type": "function", "function": {"name": "f", "description": attack}}
    assert api.chat(say("ok"), tools=[tool]).status_code == 200
    assert "49" not in TOKENIZER.decode(api.engine.submitted[-1].prompt)


def test_paths_do_not_reach_the_file_system(api: Running):
    for path in (
        "/web/../app.py",
        "/web/..%2f..%2fkeys.py",
        "/web/%2e%2e/core.py",
        "//etc/passwd",
        "/v1/models/..%2f..%2fx",
    ):
        error_of(api.get(path), 404)
    error_of(api.get(CHAT), 405)


def test_content_type_and_encoding(api: Running):
    content = json.dumps(body_of()).encode()
    error_of(api.http.post(CHAT, content=content, headers={"content-type": "text/plain"}), 415)
    error_of(api.http.post(CHAT, content=content, headers={**JSON, "content-encoding": "br"}), 415)
    packed = {**JSON, "content-encoding": "gzip"}
    assert api.http.post(CHAT, content=gzip.compress(content), headers=packed).status_code == 200
    error_of(api.http.post(CHAT, content=content, headers=packed), 400)
    error_of(api.http.post(CHAT, content=gzip.compress(content)[:-9], headers=packed), 400)


def test_oversized_bodies(small: Running):
    error_of(small.chat(say("x" * 30_000)), 413)
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) > 20_000
    error_of(
        small.http.post(CHAT, content=gzip.compress(b" " * 10_000_000), headers={**JSON, "content-encoding": "gzip"}),
        413,
    )

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    error_of(small.http.post(CHAT, content=endless(), headers=JSON), 413)


def test_body_that_never_comes(small: Running):
    with socket.create_connection(small.server.address, timeout=120) as client:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(head.encode() + b'content-length: 100\r\n\r\n{"mod')
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 ")
    assert small.get("/health").status_code == 200


def test_headers_that_never_come(small: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("openwafer.serve.api.server._Protocol.header_timeout_s", 0.3)
    address = small.server.address
    with (
        socket.create_connection(address, timeout=120) as silent,
        socket.create_connection(address, timeout=10) as slow,
    ):
        slow.sendall(b"GET /health HTTP/1.1\r\nx: ")
        for client in (slow, silent):
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""


def test_client_that_does_not_read_is_dropped(small: Running):
    """It holds neither the engine nor the connection for long."""
    body = json.dumps(body_of(stream=True, n=2, logprobs=True, top_logprobs=20)).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(small.server.address)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        deadline = time.monotonic() + 60
        while not small.engine.stats().num_running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        small.wait_idle()
    assert small.get("/health").status_code == 200


def test_full_queue_is_a_503_and_nothing_is_left_over(small: Running):
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda _: small.chat(say("x"), max_tokens=100), range(40)))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused
    assert len(refused) < 40
    assert {answer.status_code for answer in answers} == {200, 503}
    assert all(error_of(answer, 503)["code"] == "queue_full" for answer in refused)
    assert all(answer.headers["x-should-retry"] == "true" and answer.headers["retry-after"] for answer in refused)
    # Many answers of one request are refused as a whole.
    assert small.chat(say("x"), n=50, max_tokens=1).status_code == 503
    small.wait_idle()
    assert small.chat(say("x"), max_tokens=1).status_code == 200


def test_a_thousand_requests_at_once_are_bounded(small: Running):
    """All connected, all asking: every one gets 200 or 503, and then the server is idle."""
    body = json.dumps(body_of(max_tokens=1)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    request = head.encode() + b"content-type: application/json\r\n\r\n" + body
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(small.server.address, timeout=60)) for _ in range(1000)]
        for client in clients:
            client.sendall(request)
        statuses = collections.Counter(client.recv(65536)[9:12] for client in clients)
    assert set(statuses) == {b"200", b"503"}
    assert statuses.total() == 1000
    small.wait_idle()
    assert small.get("/health").status_code == 200


@pytest.mark.parametrize("sent", [b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"])
def test_what_is_not_http_gets_an_error_of_the_same_shape(api: Running, sent: bytes):
    with socket.create_connection(api.server.address, timeout=60) as client:
        client.sendall(sent)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    response = httpx.Response(int(status.split()[1]), headers=headers, content=body)
    assert "not an HTTP request" in error_of(response, 400)["message"]


def test_a_header_without_end_is_not_kept(api: Running):
    began = time.monotonic()
    with socket.create_connection(api.server.address, timeout=60) as client, pytest.raises(ConnectionError):
        client.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * 200_000_000)
    assert time.monotonic() - began < 15  # half of what headers may take


def test_a_body_that_nobody_wanted_is_no_header(api: Running):
    """The answer comes before the body has: what still comes is read, and the connection is good for the next."""
    unwanted = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n"
    with socket.create_connection(api.server.address, timeout=60) as client:
        client.sendall(unwanted)
        assert client.recv(65536).startswith(b"HTTP/1.1 404 ")
        client.sendall(b"a" * 3_000_000 + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200 OK" in client.recv(65536)


def test_other_sites_cannot_use_a_visitors_browser(api: Running):
    error_of(api.get("/v1/models", headers={"host": "evil.example:80"}), 403)
    for host in ("localhost:1234", "127.0.0.1", "[::1]:80"):
        assert api.get("/v1/models", headers={"host": host}).status_code == 200


def test_pages_load_nothing_from_elsewhere(api: Running):
    for path in ("/", "/playground", "/console", "/docs"):
        response = api.get(path)
        assert response.status_code == 200
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "http://" not in response.text
        assert "https://" not in response.text


def test_request_ids(api: Running):
    assert api.get("/health", headers={"x-request-id": "my-id_1"}).headers["x-request-id"] == "my-id_1"
    for bad in ("a b", "x" * 65, "a;b", "<script>"):
        assert api.get("/health", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req_")


def test_the_same_request_id_twice_at_once(api: Running):
    """Ids of clients are for logs; the engine has its own."""
    headers = {"x-request-id": "same"}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: api.post(CHAT, body_of(messages=say(f"nr {i}")), headers=headers), range(8)))
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == [f"nr {i}" for i in range(8)]


def test_logs_have_ids_and_no_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("openwafer.serve"), "propagate", True)
    with caplog.at_level(logging.INFO, "openwafer.serve"), running(tmp_path, api_key="s3cret-key") as server:
        headers = {"authorization": "Bearer s3cret-key", "x-request-id": "abc"}
        assert server.post(CHAT + "?token=s3cret-key", body_of(), headers=headers).status_code == 200
        assert server.post(CHAT, body_of(), headers={"authorization": "Bearer wrong-key"}).status_code == 401
    for formatter in (JsonFormatter(), TextFormatter()):
        lines = [formatter.format(record) for record in caplog.records]
        assert any("abc" in line and "200" in line for line in lines)
        assert not any("s3cret" in line or "wrong-key" in line or "SAY<<" in line for line in lines)
    assert all("\n" not in TextFormatter().format(record) for record in caplog.records)


def test_engine_failure_is_a_500_in_the_right_place(tmp_path: Path):
    class Failing(ScriptEngine):
        def _step(self, running_: Any) -> None:
            if len(running_.written) < 3:
                super()._step(running_)
                return
            with self._lock:
                self._running.pop(running_.request.id, None)
            running_.on_event(Event(finish_reason="error", error="the device is gone"))

    engine = Failing(lambda _: [40] * 9, vocab_size=TOKENIZER.vocab_size, step_s=0.05)
    with running(tmp_path, engine) as server:
        error = error_of(server.chat(say("x")), 500)
        assert error["message"] == "the device is gone"
        streamed = server.chat(say("x"), stream=True)
        assert streamed.status_code == 200
        events = [line for line in streamed.text.splitlines() if line]
        last = json.loads(events[-2].removeprefix("data: "))
        assert (last["status_code"], last["error"]["message"]) == (500, "the device is gone")
        assert server.get("/health").status_code == 200


def test_our_own_fault_has_the_shape_of_errors_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("openwafer.serve"), "propagate", True)

    class Broken(ScriptEngine):
        def submit(self, request: Any, on_event: Any) -> None:
            raise ZeroDivisionError("secret detail")

    with running(tmp_path, Broken(lambda _: [], vocab_size=TOKENIZER.vocab_size)) as server:
        response = server.chat(say("x"))
        error = error_of(response, 500)
        assert response.headers["x-request-id"] in error["message"]
        assert "secret detail" not in response.text
        assert server.get("/health").status_code == 200
    assert any("ZeroDivisionError" in (record.exc_text or "") for record in caplog.records)
