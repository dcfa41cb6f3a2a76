"""Steps planned before the last one's tokens are known: seldom seen from outside, and never in an answer."""

import numpy as np
import pytest
import torch

from openwafer.models.generate import generate
from openwafer.serve.engine import EngineConfig, LocalEngine
from openwafer.serve.gpu.runner import GpuRunner
from openwafer.serve.runner import AheadRunner
from tests.serve.conftest import CONFIGS, Client, tiny_module, tiny_program

PROMPT = np.random.default_rng(2).integers(0, 101, 21).tolist()


@pytest.fixture
def client():
    runner = GpuRunner(
        tiny_program(CONFIGS["llama"]),
        num_blocks=24,
        max_rows=32,
        max_sequences=8,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    assert isinstance(runner, AheadRunner)
    engine = LocalEngine(runner, CONFIGS["llama"], EngineConfig(max_step_tokens=32, max_running=8), max_context=64)
    yield Client(engine)
    engine.close()


def greedy(num_tokens: int) -> list[int]:
    return list(generate(tiny_module(CONFIGS["llama"]), PROMPT, max_tokens=num_tokens))


def test_two_batches_are_under_way(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = client.engine._runner
    assert isinstance(runner, GpuRunner)
    launch, under_way, follows = runner.launch, [], []

    def counted(batch, draws) -> None:
        under_way.append(len(runner._launched))
        follows.append(batch.follows)
        launch(batch, draws)

    monkeypatch.setattr(runner, "launch", counted)
    assert client.ask(PROMPT, max_tokens=12).tokens == greedy(12)
    # The prompt, then eleven more tokens, each launched while the one before it was being drawn.
    assert under_way == [0] + [1] * 11
    assert [None if rows is None else rows.tolist() for rows in follows] == [None] + [[0]] * 11
    # With logprobs the host sees every row of logits before the next.
    under_way.clear()
    client.ask(PROMPT, max_tokens=5, num_logprobs=1)
    assert under_way == [0] * 5


def test_what_follows_a_stop_is_dropped(client: Client) -> None:
    tokens = greedy(30)
    stop = next(token for token in tokens[6:] if token not in tokens[:6])
    answers = [client.start(client.request(PROMPT, max_tokens=30, stop_ids=frozenset([stop]))) for _ in range(3)]
    for events in answers:
        answer = client.wait(events)
        assert answer.tokens == tokens[: tokens.index(stop)]
        assert answer.last.finish_reason == "stop"
        assert answer.last.usage is not None
        assert answer.last.usage.num_completion_tokens == len(answer.tokens)
    assert client.engine.stats().kv_cache_usage == 0
    # Nor is it found in the cache: the text so far, and what would have followed.
    again = client.ask([*PROMPT, *tokens[:20]], max_tokens=8)
    assert again.tokens == tokens[20:28]


def test_the_end_of_the_context_ends_the_answer(client: Client) -> None:
    answer = client.ask(PROMPT, max_tokens=100)
    assert answer.tokens == greedy(64 - len(PROMPT))
    assert answer.last.finish_reason == "length"


def test_requests_with_too_few_blocks_and_some_that_the_host_draws(client: Client) -> None:
    """24 blocks for six that need four each, and predictions and logprobs among them."""
    expected = greedy(40)
    kinds = [{}, {"num_logprobs": 0}, {}, {"stop_ids": frozenset([500]), "min_tokens": 3}, {}, {}, {}, {}]
    prompts = [PROMPT[:number] + PROMPT for number in range(8)]
    alone = [client.ask(prompt, max_tokens=36, **kind).tokens for prompt, kind in zip(prompts, kinds, strict=True)]
    assert alone[0] == expected[:36]
    requests = [client.request(prompt, max_tokens=36, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    started = [client.start(request) for request in requests]
    client.engine.cancel(requests[5].id)
    for number, events in enumerate(started):
        answer = client.wait(events)
        if number != 5:
            assert answer.tokens == alone[number]
    assert client.engine.num_preemptions > 0
    assert client.engine.stats().kv_cache_usage == 0
