"""The two real clients against a real socket: only the base URL differs from what their makers document."""

import json
from collections.abc import Iterator
from typing import Any

import cerebras.cloud.sdk as vendor
import openai
import openai.types.chat
import pytest
from cerebras.cloud.sdk.types.chat import chat_completion as vendor_types

from tests.serve.script_server import Running, say

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(api: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def vendor_client(api: Running) -> Iterator[vendor.Cerebras]:
    with vendor.Cerebras(base_url=api.url, api_key="any", max_retries=0) as client:
        yield client


def test_openai_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model="script", messages=say("Grüezi 😀!"), temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == "Grüezi 😀!"
    assert (choice.finish_reason, choice.message.role, answer.model) == ("stop", "assistant", "script")
    assert answer.system_fingerprint
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Grüezi 😀!".encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_openai_stream(client: openai.OpenAI):
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="script", messages=say("Grüezi 😀!"), stream=True, stream_options=options
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Grüezi 😀!"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 13
    assert len({chunk.id for chunk in chunks}) == 1


def test_openai_several_answers(client: openai.OpenAI):
    answer = client.chat.completions.create(model="script", messages=say("one"), n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(i, "one") for i in range(3)]
    assert answer.usage.completion_tokens == 9
    texts = ["", "", ""]
    reasons = []
    for chunk in client.chat.completions.create(model="script", messages=say("one"), n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == ["one"] * 3
    assert reasons == ["stop"] * 3


def test_openai_tools_and_back(client: openai.OpenAI):
    answer = client.chat.completions.create(model="script", messages=say(CALL), tools=[WEATHER])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    # What came back goes into the next turn as it is, nulls and all.
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [*say(CALL), message.model_dump(), result, *say("It is sunny.")]
    answer = client.chat.completions.create(model="script", messages=turns, tools=[WEATHER])
    assert answer.choices[0].message.content == "It is sunny."


def test_openai_tool_stream_helper(client: openai.OpenAI):
    """The client's own collector of deltas is strict about their shape."""
    with client.chat.completions.stream(model="script", messages=say(CALL), tools=[WEATHER]) as stream:
        fragments = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert len(fragments) > 5
    assert json.loads("".join(fragments)) == {"city": "Zürich"}
    assert final.choices[0].message.tool_calls[0].function.name == "weather"
    assert final.choices[0].finish_reason == "tool_calls"


def test_openai_parse_into_a_class(client: openai.OpenAI):
    import pydantic

    class City(pydantic.BaseModel):
        name: str
        size: int

    answer = client.chat.completions.parse(
        model="script", messages=say('{"name": "Bern", "size": 140}'), response_format=City
    )
    assert answer.choices[0].message.parsed == City(name="Bern", size=140)


def test_openai_completions(client: openai.OpenAI):
    prompt = "SAY<<abc>>END"
    answer = client.completions.create(model="script", prompt=[prompt, prompt], max_tokens=2, logprobs=2, echo=True)
    assert [choice.text for choice in answer.choices] == [prompt + "abc"] * 2
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == prompt + "abc"
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset[-2:] == [len(prompt), len(prompt) + 2]
    streamed = client.completions.create(model="script", prompt=prompt, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "abc"


def test_openai_models_and_errors(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["script", "org/script"]
    assert client.models.retrieve("org/script").id == "org/script"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=say("x"))
    assert missing.value.code == "model_not_found"
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="script", messages=say("x"), temperature=3)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


def test_vendor_chat(vendor_client: vendor.Cerebras):
    answer: Any = vendor_client.chat.completions.create(model="script", messages=say("Hoi"), max_completion_tokens=2)
    assert answer.choices[0].message.content == "Ho"
    assert answer.choices[0].finish_reason == "length"
    times = answer.time_info
    assert 0 < times.completion_time <= times.total_time
    assert times.queue_time >= 0
    assert times.prompt_time > 0
    assert times.created > 1e9
    assert answer.usage.prompt_tokens > 0


def test_vendor_stream(vendor_client: vendor.Cerebras):
    stream: Any = vendor_client.chat.completions.create(model="script", messages=say("Hoi zäme"), stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hoi zäme"
    last = chunks[-1]
    assert last.choices[0].finish_reason == "stop"
    assert last.usage.completion_tokens == len("Hoi zäme".encode())
    assert last.time_info.completion_time > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_vendor_tools_completions_models(vendor_client: vendor.Cerebras):
    answer: Any = vendor_client.chat.completions.create(
        model="script", messages=say(CALL), tools=[WEATHER], tool_choice="required"
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    text: Any = vendor_client.completions.create(model="script", prompt="SAY<<abc>>END", return_raw_tokens=True)
    assert text.choices[0].text == "abc"
    assert len(text.choices[0].tokens) == 2
    assert vendor_client.models.retrieve("script").id == "script"


def test_vendor_errors(vendor_client: vendor.Cerebras):
    with pytest.raises(vendor.BadRequestError):
        vendor_client.chat.completions.create(model="script", messages=[])
    with pytest.raises(vendor.NotFoundError):
        vendor_client.chat.completions.create(model="nope", messages=say("x"))


def test_async_client(api: Running):
    import asyncio

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any") as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model="script", messages=say(f"nr {i}")) for i in range(16))
            )
        return [answer.choices[0].message.content or "" for answer in answers]

    assert asyncio.run(ask()) == [f"nr {i}" for i in range(16)]


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": [WEATHER]}, {"logprobs": True, "top_logprobs": 3}, {"n": 2, "service_tier": "auto"}],
    ids=lambda fields: " ".join(fields),
)
def test_answers_are_what_the_clients_types_say(api: Running, fields: dict[str, Any]):
    """The clients themselves forgive what is missing, and hand out something of another type."""
    body = {"model": "script", "messages": say(CALL if "tools" in fields else "abc"), **fields}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for agent, whole, part in (
        ("OpenAI/Python", openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
        ("Cerebras/Python", vendor_types.ChatCompletionResponse, vendor_types.ChatChunkResponse),
    ):
        headers = {"user-agent": agent}
        whole.model_validate(api.post("/v1/chat/completions", body, headers=headers).json())
        lines = api.post("/v1/chat/completions", streamed, headers=headers).text.split("\n\n")
        chunks = [part.model_validate_json(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert len(chunks) > 3
