"""Keys and limits over HTTP."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cerebras.cloud.sdk as vendor
import openai
import pytest

from openwafer.errors import UserError
from openwafer.serve.api.config import ServeConfig
from openwafer.serve.api.server import ApiServer
from openwafer.serve.api.service import Service
from openwafer.serve.keys import KeyStore
from tests.serve.script_server import Running, running, say


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a key of its own."""
    with running(tmp_path_factory.mktemp("closed"), api_key="master", host="127.0.0.1") as server:
        yield server


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    "header", [{}, {"authorization": "Bearer"}, bearer("wrong"), {"authorization": "Basic master"}, bearer("mästér")]
)
def test_wrong_keys(closed: Running, header: dict[str, str]):
    encoded = {name: value.encode() for name, value in header.items()}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize")):
        response = closed.http.request(method, path, headers=encoded)  # pyright: ignore
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/metrics", "/v1/tcp_warming", "/", "/docs"):
        assert closed.get(path).status_code == 200


def test_keys_work_until_they_are_revoked(closed: Running):
    key, secret = closed.store.create("someone")
    with openai.OpenAI(base_url=f"{closed.url}/v1", api_key=secret, max_retries=0) as client:
        assert client.chat.completions.create(model="script", messages=say("hi")).choices[0].message.content == "hi"
        closed.store.revoke(key.id)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_requests_per_day(closed: Running):
    _, secret = closed.store.create("few", requests_per_day=2)
    body = {"model": "script", "messages": say("x")}
    remaining = []
    for _ in range(2):
        response = closed.post("/v1/chat/completions", body, headers=bearer(secret))
        assert response.status_code == 200
        remaining.append(int(response.headers["x-ratelimit-remaining-requests-day"]))
    assert remaining == [1, 0]
    refused = closed.post("/v1/chat/completions", body, headers=bearer(secret))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "requests_per_day_exceeded"
    assert 40_000 < int(refused.headers["retry-after"]) <= 43_200
    assert refused.headers["x-should-retry"] == "false"
    assert refused.headers["x-ratelimit-limit-requests-day"] == "2"
    listed = {key["name"]: key for key in closed.get("/console/keys", headers=bearer("master")).json()["keys"]}
    assert (listed["few"]["requests_left"], listed["few"]["tokens_left"]) == (0, None)
    # Looking at models costs nothing.
    assert closed.get("/v1/models", headers=bearer(secret)).status_code == 200


@pytest.mark.parametrize("make", [openai.OpenAI, vendor.Cerebras])
def test_real_clients_do_not_wait_for_the_next_day(closed: Running, make: Any):
    key, secret = closed.store.create("daily", requests_per_day=8640)
    closed.store.save_buckets([(key.id, "requests-day", 0.0, time.time())])  # 10 s to the next: they would wait so long
    url = closed.url if make is vendor.Cerebras else f"{closed.url}/v1"
    began = time.monotonic()
    errors = (openai.RateLimitError, vendor.RateLimitError)
    with make(base_url=url, api_key=secret, max_retries=2) as client, pytest.raises(errors) as refused:
        client.chat.completions.create(model="script", messages=say("hi"))
    waited_s = time.monotonic() - began
    assert waited_s < int(refused.value.response.headers["retry-after"]) <= 10
    assert "8640 requests per day" in str(refused.value)


def test_real_client_waits_for_the_next_tokens(closed: Running):
    key, secret = closed.store.create("minutely", tokens_per_minute=60_000)
    closed.store.save_buckets([(key.id, "tokens-minute", 0.0, time.time())])
    with openai.OpenAI(base_url=f"{closed.url}/v1", api_key=secret, max_retries=1) as client:
        began = time.monotonic()
        answer = client.chat.completions.create(model="script", messages=say("hi"), max_tokens=1500)
    assert answer.choices[0].message.content == "hi"
    # 1,000 tokens a second: over 1.5 s, in whole seconds.
    assert 1.9 < time.monotonic() - began < 30


def test_tokens_per_minute(closed: Running):
    _, secret = closed.store.create("short", tokens_per_minute=1000)
    body = {"model": "script", "messages": say("x"), "max_completion_tokens": 900}
    first = closed.post("/v1/chat/completions", body, headers=bearer(secret))
    used = first.json()["usage"]["total_tokens"]
    models = closed.get("/v1/models", headers=bearer(secret))
    # What was reserved and not used came back.
    assert 1000 - used <= int(models.headers["x-ratelimit-remaining-tokens-minute"]) <= 1000
    assert int(first.headers["x-ratelimit-remaining-tokens-minute"]) <= 1000
    refused = closed.post("/v1/chat/completions", {**body, "max_completion_tokens": 2000}, headers=bearer(secret))
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    # Nobody asked for a length: the whole bucket is reserved, and given back.
    assert closed.post(
        "/v1/chat/completions", {"model": "script", "messages": say("x")}, headers=bearer(secret)
    ).status_code in (200, 429)


def test_usage_is_booked_per_key_model_and_day(closed: Running):
    key, secret = closed.store.create("counted")
    for stream in (False, True):
        body = {"model": "script", "messages": say("abc"), "stream": stream}
        assert closed.post("/v1/chat/completions", body, headers=bearer(secret)).status_code == 200
    rows = closed.get("/console/usage", headers=bearer("master")).json()["usage"]
    mine = [row for row in rows if row["key_id"] == key.id]
    assert sum(row["requests"] for row in mine) == 2
    assert sum(row["completion_tokens"] for row in mine) == 4
    assert {row["model"] for row in mine} == {"script"}
    recent = closed.get("/console/requests", headers=bearer("master")).json()["requests"]
    assert recent[0]["key_name"] == "counted"
    assert recent[0]["finish_reason"] == "stop"
    assert 0 < recent[0]["first_token_s"] <= recent[0]["total_s"]


def test_console_is_for_admins(closed: Running):
    _, plain = closed.store.create("plain")
    _, admin = closed.store.create("admin", is_admin=True)
    for path in ("/console/keys", "/console/usage", "/console/requests"):
        assert closed.get(path).status_code == 401
        assert closed.get(path, headers=bearer(plain)).status_code == 403
        assert closed.get(path, headers=bearer(admin)).status_code == 200
    assert closed.post("/console/keys", {"name": "x"}, headers=bearer(plain)).status_code == 403
    made = closed.post("/console/keys", {"name": "x", "tokens_per_minute": 5}, headers=bearer(admin)).json()
    assert closed.get("/v1/models", headers=bearer(made["secret"])).headers["x-ratelimit-limit-tokens-minute"] == "5"
    listed = closed.get("/console/keys", headers=bearer(admin))
    assert made["secret"] not in listed.text
    assert "hash" not in listed.text
    assert closed.http.delete(f"/console/keys/{made['id']}", headers=bearer(plain)).status_code == 403
    assert closed.http.delete(f"/console/keys/{made['id']}", headers=bearer(admin)).status_code == 200
    assert closed.http.delete(f"/console/keys/{made['id']}", headers=bearer(admin)).status_code == 404
    assert closed.get("/v1/models", headers=bearer(made["secret"])).status_code == 401
    status = closed.get("/console/status", headers=bearer(plain)).json()
    assert status == {"needs_key": True, "is_admin": False, "has_access": True}


def test_first_key_closes_an_open_server(tmp_path: Path):
    with running(tmp_path) as server:
        assert server.get("/console/keys").status_code == 200
        made = server.post("/console/keys", {"name": "me", "is_admin": True}).json()
        assert server.get("/v1/models").status_code == 401
        assert server.get("/console/keys", headers=bearer(made["secret"])).status_code == 200


def test_without_keys_only_loopback(tmp_path: Path):
    store = KeyStore(tmp_path / "keys.sqlite")
    with pytest.raises(UserError, match="no API keys"):
        ApiServer(Service(ServeConfig(host="0.0.0.0", port=0), store, ("m",)), lambda: None)  # pyright: ignore
    server = ApiServer(Service(ServeConfig(port=0), store, ("m",)), lambda: None)  # pyright: ignore
    assert server.address[0] == "127.0.0.1"
    server.socket.close()
    key, _ = store.create("a")
    service = Service(ServeConfig(port=0), store, ("m",))
    server = ApiServer(service, lambda: None)  # pyright: ignore
    assert server.address[0] == "0.0.0.0"
    server.socket.close()
    store.revoke(key.id)
    assert service.needs_key  # others can reach it: losing the last key does not open it
    store.close()
