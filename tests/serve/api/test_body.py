"""Bodies that are as large as they may be, and wrong in every item: what they cost."""

import json
import time
from typing import Any

import pydantic_core
import pytest

from openwafer.serve.api.body import parse_body
from openwafer.serve.api.errors import ApiError
from openwafer.serve.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest

NUM = 100_000
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": 5}] * NUM}, "messages.0.content: input should be a"),
        (ChatRequest, {"messages": [USER] * NUM}, "at most 10000 items"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text"}] * NUM}]}, "0.text is missing"),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{"id": 5}] * NUM}]}, "0.function is missing"),
        (ChatRequest, {"messages": [USER], **{f"f{i}": 1 for i in range(NUM)}}, "fields are more than there are"),
        (ChatRequest, {"messages": [{**USER, **{f"f{i}": 1 for i in range(NUM)}}]}, "fields are more than there are"),
        (ChatRequest, {"messages": [USER], "logit_bias": {str(i): "x" for i in range(NUM)}}, "at most 1024 tokens"),
        (CompletionRequest, {"prompt": ["a", 1] * NUM}, "prompt must be text"),
        (DetokenizeRequest, {"tokens": ["a"] * NUM}, "tokens.0: input should be a valid integer"),
    ],
)
def test_one_mistake_is_enough(model: Any, fields: dict[str, Any], reason: str) -> None:
    """Collecting all of them took fifteen times as long as reading the body, in which nobody else was served."""
    body = json.dumps({"model": "script", **fields}).encode()
    began = time.thread_time()
    pydantic_core.from_json(body)
    read_s = time.thread_time() - began
    began = time.thread_time()
    with pytest.raises(ApiError, match=reason) as refused:
        parse_body(model, body)
    assert time.thread_time() - began < 8 * read_s + 0.3
    assert refused.value.status == 400
