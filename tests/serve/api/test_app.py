"""The routes that the clients do not cover, and fields that reach the engine."""

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from openwafer.models.tokenizer import Tokenizer
from openwafer.serve.api.conversation import render
from openwafer.serve.api.schema import (
    AssistantMessage,
    CalledFunction,
    Function,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from openwafer.serve.api.served_model import ServedModel
from tests.serve.script_engine import ScriptEngine
from tests.serve.script_server import TOKENIZER, Running, running, say


def test_tokenize_and_back(api: Running):
    answer = api.post("/tokenize", {"prompt": "the ab"}).json()
    assert answer["tokens"] == TOKENIZER.encode("the ab")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096
    assert api.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "the ab"}
    chat = api.post("/tokenize", {"model": "script", "messages": say("x")}).json()["tokens"]
    api.chat(say("x"))
    assert tuple(chat) == api.engine.submitted[-1].prompt
    assert api.post("/detokenize", {"tokens": [10**6]}).status_code == 400
    assert api.post("/tokenize", {}).status_code == 400
    assert api.post("/tokenize", {"prompt": "x", "model": "nope"}).status_code == 404


def test_sampling_fields_reach_the_engine(api: Running):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.3, "presence_penalty": -0.2,
        "logit_bias": {"5": -3.0}, "min_tokens": 2, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 3,
        "prediction": {"type": "content", "content": "ab"}, "user": "u", "prompt_cache_key": "k",
        "reasoning_effort": "low", "metadata": {"a": "b"}, "safety_identifier": "s", "store": False,
        "modalities": ["text"],
    }  # fmt: skip
    answer = api.chat(say("abcd"), service_tier="auto", **fields)
    assert answer.status_code == 200
    assert answer.json()["service_tier"] == "auto"
    request = api.engine.submitted[-1]
    drawn = request.sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p) == (0.5, 0.9, 7, 0.1)
    assert (drawn.frequency_penalty, drawn.presence_penalty, drawn.logit_bias) == (0.3, -0.2, {5: -3.0})
    assert (drawn.min_tokens, drawn.max_tokens, drawn.num_logprobs) == (2, 9, 3)
    assert drawn.stop_ids == frozenset(TOKENIZER.eos_ids)
    assert request.prediction == tuple(TOKENIZER.encode("ab"))
    api.chat(say("x"), min_completion_tokens=3, max_completion_tokens=9)
    assert api.engine.submitted[-1].sampling.min_tokens == 3
    assert api.chat(say("x"), store=True).json()["error"]["param"] == "store"
    api.chat(say("x"), top_k=0, max_tokens=-1)
    drawn = api.engine.submitted[-1].sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.num_logprobs) == (1.0, 1.0, None, None)
    assert drawn.max_tokens == 4096 - len(api.engine.submitted[-1].prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_at_all(api: Running, stream: bool):
    answer = api.chat(say("abc"), max_tokens=0)
    assert answer.json()["choices"][0]["message"]["content"] == ""
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    body = {"model": "script", "prompt": "ab the", "max_tokens": 0, "echo": True, "logprobs": 0}
    scored = api.post("/v1/completions", body).json()
    assert scored["choices"][0]["text"] == "ab the"
    assert scored["choices"][0]["logprobs"]["tokens"] == ["ab", " ", "th", "e"]
    assert scored["usage"]["completion_tokens"] == 0


def test_completion_logprobs_stream_as_the_whole(api: Running):
    body = {"model": "script", "prompt": "SAY<<grün ab>>END", "logprobs": 1, "echo": True}
    whole = api.post("/v1/completions", body).json()["choices"][0]
    text, lists = "", {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for line in api.post("/v1/completions", {**body, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                lists[name] += values
    assert text == whole["text"]
    assert lists == whole["logprobs"]
    assert [whole["text"][at] for at in whole["logprobs"]["text_offset"][-2:]] == [" ", "a"]


def test_best_of_takes_the_likeliest(api: Running):
    script = api.engine.script
    answers = iter(["ccc", "hhh", "jjj"])  # their tokens' logprobs differ: see ScriptEngine
    api.engine.script = lambda request: TOKENIZER.encode(next(answers)) + [1]
    try:
        body = {"model": "script", "prompt": "x", "n": 2, "best_of": 3}
        answer = api.post("/v1/completions", body).json()
    finally:
        api.engine.script = script

    def score(text: str) -> float:
        return -(TOKENIZER.encode(text)[0] % 7)

    ranked = sorted(["ccc", "hhh", "jjj"], key=score, reverse=True)
    assert [choice["text"] for choice in answer["choices"]] == ranked[:2]
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["choices"][0]["logprobs"] is None


def test_metrics_have_the_names_people_scrape(tmp_path: Path):
    with running(tmp_path) as server:
        server.chat(say("abcd"))
        server.chat(say("abcd"), stream=True, max_tokens=1)
        families = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}
    values = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in families.values()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
    assert values["openwafer:num_requests_running", None] == 0
    assert values["openwafer:num_requests_waiting", None] == 0
    assert values["openwafer:kv_cache_usage_perc", None] == 0
    assert values["openwafer:prompt_tokens_total", None] > 20
    assert values["openwafer:generation_tokens_total", None] == 4
    assert values["openwafer:spec_decode_num_draft_tokens_total", None] == 0
    assert values["openwafer:spec_decode_num_accepted_tokens_total", None] == 0
    assert values["openwafer:request_success_total", "stop"] == 1
    assert values["openwafer:request_success_total", "length"] == 1
    assert values["openwafer:time_to_first_token_seconds_count", None] == 2
    assert values["openwafer:inter_token_latency_seconds_count", None] == 2
    assert values["openwafer:e2e_request_latency_seconds_count", None] == 2


def test_openapi_document(api: Running):
    document = api.get("/openapi.json").json()
    assert set(document["paths"]) >= {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/health", "/metrics",
    }  # fmt: skip
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model", "messages"]
    assert "422" not in str(document["paths"]["/v1/chat/completions"]["post"]["responses"].keys())


def test_models_without_a_tool_template_are_told_about_tools(tmp_path: Path):
    plain = Tokenizer(TOKENIZER.backend, chat_template="{% for m in messages %}[{{m.role}}]{{m.content}}{% endfor %}")
    engine = ScriptEngine(lambda _: [], vocab_size=10)
    served = ServedModel.make(("m",), engine, plain)
    assert served.tool_format.name == "generic"
    call = ToolCall(id="1", type="function", function=CalledFunction(name="f", arguments='{"a": 1}'))
    text = render(
        served,
        [
            UserMessage(role="user", content="go"),
            AssistantMessage(role="assistant", content=None, tool_calls=[call]),
            ToolMessage(role="tool", tool_call_id="1", content="42"),
        ],
        [Tool(type="function", function=Function(name="f", description="does f"))],
    )
    assert text.startswith("[system]You can call these functions:")
    assert "does f" in text
    assert '[assistant]<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "[user]<tool_response>\n42\n</tool_response>" in text
    engine.close()


def test_templates_that_ask_for_none(tmp_path: Path):
    """Published templates test `tools is not none`, which is true of a variable that nobody gave."""
    asks = "{% if tools is not none %}TOOLS{% endif %}{% if documents is not none %}DOCS{% endif %}"
    template = asks + "{{ messages[0].content }}"
    engine = ScriptEngine(lambda _: [], vocab_size=10)
    served = ServedModel.make(("m",), engine, Tokenizer(TOKENIZER.backend, chat_template=template))
    assert render(served, [UserMessage(role="user", content="hi")]) == "hi"
    engine.close()


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("/v1/v1/chat/completions", "the client adds /v1 itself, so leave it out"),
        ("/chat/completions", "there is at /v1/chat/completions: end the client's base URL with /v1"),
        ("/v1/nothing", ""),
    ],
)
def test_a_base_url_that_is_a_little_wrong_is_told(tmp_path: Path, path: str, fix: str):
    with running(tmp_path) as server:
        response = server.post(path, {})
    assert response.status_code == 404
    assert response.json()["error"]["message"].startswith(f"there is nothing at {path}")
    assert fix in response.json()["error"]["message"]
