"""The engine on tiny models: what comes back, and that it never depends on who else is there."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from openwafer.models.generate import generate
from openwafer.models.load import load
from openwafer.serve.core import Event, QueueFullError
from openwafer.serve.engine import EngineConfig, LocalEngine, open_engine
from openwafer.serve.speculation import Lookup
from tests.serve.conftest import CONFIGS, Answer, Client, OpenTiny, tiny_module

RNG = np.random.default_rng(1)
PROMPT = RNG.integers(0, 101, 37).tolist()
DRAWN = {"temperature": 1.0, "seed": 7, "num_logprobs": 2, "max_tokens": 24}


def until(condition, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def bits(answer: Answer) -> tuple[list[int], bytes]:
    values = [[entry.logprob, *(p for _, p in entry.top)] for entry in answer.logprobs]
    return answer.tokens, np.array(values).tobytes()


@pytest.mark.parametrize("name", ["llama", "gpt", "gemma3"])
def test_greedy_answers_are_those_of_the_plain_loop(open_tiny: OpenTiny, name: str) -> None:
    config = CONFIGS[name]
    expected = list(generate(tiny_module(config), PROMPT, max_tokens=40))
    answer = open_tiny(config).ask(PROMPT, max_tokens=40)
    assert answer.tokens == expected
    assert answer.last.finish_reason == "length"
    assert answer.last.usage is not None
    assert (answer.last.usage.num_prompt_tokens, answer.last.usage.num_completion_tokens) == (37, 40)


@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}])
def test_a_request_yields_the_same_bits_alone_and_among_32_others(open_tiny: OpenTiny, options: dict[str, str]) -> None:
    alone = bits(open_tiny(max_step_tokens=64, **options).ask(PROMPT, **DRAWN))
    assert len(set(alone[0])) > 4  # it does draw
    # Too few blocks for all: pieces, cache hits, preemption.
    crowd = open_tiny(max_step_tokens=23, num_blocks=24, **options)
    assert bits(crowd.ask_in_a_crowd(PROMPT, **DRAWN)) == alone
    assert crowd.engine.num_preemptions > 0
    # And again, its beginning now in the cache.
    crowd.ask(PROMPT, max_tokens=1)
    again = crowd.ask(PROMPT, **DRAWN)
    assert bits(again) == alone
    assert again.last.usage is not None
    assert again.last.usage.num_cached_tokens >= 32
    assert crowd.engine.stats().kv_cache_usage == 0


def test_other_seeds_give_other_answers_and_none_is_drawn_anew(open_tiny: OpenTiny) -> None:
    client = open_tiny()
    answers = [client.ask(PROMPT, **DRAWN | {"seed": seed}).tokens for seed in (1, 1, 2, None, None)]
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers}) == 4


def test_logprobs_are_those_of_the_model(open_tiny: OpenTiny) -> None:
    answer = open_tiny().ask(PROMPT, max_tokens=3, num_logprobs=4, prompt_logprobs=True)
    with torch.inference_mode():
        logits = tiny_module(CONFIGS["llama"])(torch.tensor([PROMPT + answer.tokens]))[0]
    expected = logits.log_softmax(-1)
    assert answer.prompt_logprobs[0] is None
    for position, entry in enumerate(answer.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[position, PROMPT[position + 1]]), abs=1e-3)
    assert len(answer.prompt_logprobs) == len(PROMPT)
    for index, entry in enumerate(answer.logprobs):
        row = expected[len(PROMPT) - 1 + index]
        assert [token for token, _ in entry.top] == row.topk(4).indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)
        assert entry.logprob == entry.top[0][1]


def test_stop_ids_end_an_answer_and_min_tokens_delays_them(open_tiny: OpenTiny) -> None:
    client = open_tiny()
    tokens = client.ask(PROMPT, max_tokens=12).tokens
    stop = tokens[5]
    answer = client.ask(PROMPT, max_tokens=12, stop_ids=frozenset([stop]))
    assert answer.tokens == tokens[: tokens.index(stop)]
    assert answer.last.finish_reason == "stop"
    longer = client.ask(PROMPT, max_tokens=12, min_tokens=8, stop_ids=frozenset([stop]))
    assert len(longer.tokens) >= 8
    assert stop not in longer.tokens


def test_an_answer_ends_with_the_context(open_tiny: OpenTiny) -> None:
    answer = open_tiny(num_blocks=3).ask(PROMPT, max_tokens=1000)
    assert answer.last.finish_reason == "length"
    assert len(PROMPT) + len(answer.tokens) == 48


class OnlyEven:
    """Allows even tokens, four of them."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def allowed(self) -> bytes:
        return b"\x55" * 13

    def advance(self, token: int) -> None:
        self.drawn.append(token)

    @property
    def is_done(self) -> bool:
        return len(self.drawn) == 4


def test_a_constraint_is_obeyed_and_ends_the_answer(open_tiny: OpenTiny) -> None:
    constraint = OnlyEven()
    answer = open_tiny().ask(PROMPT, max_tokens=20, temperature=1.0, seed=3, constraint=constraint)
    assert answer.last.finish_reason == "stop"
    assert answer.tokens == constraint.drawn
    assert len(answer.tokens) == 4
    assert all(token % 2 == 0 for token in answer.tokens)


class Broken(OnlyEven):
    def allowed(self) -> bytes:
        raise ValueError("grammar went wrong")


def test_a_constraint_that_fails_ends_its_own_request_only(open_tiny: OpenTiny) -> None:
    client = open_tiny()
    other = client.start(client.request(PROMPT, max_tokens=30))
    answer = client.ask(PROMPT, constraint=Broken())
    assert answer.last.finish_reason == "error"
    assert "grammar went wrong" in (answer.last.error or "")
    assert len(client.wait(other).tokens) == 30


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], {}, "empty"),
        ([1] * 256, {}, "256 tokens"),
        ([101], {}, "0..100"),
        ([1], {"logit_bias": {500: 1.0}}, "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_told(open_tiny: OpenTiny, prompt: list[int], sampling: dict, reason: str) -> None:
    answer = open_tiny().ask(prompt, **sampling)
    assert answer.last.finish_reason == "error"
    assert reason in (answer.last.error or "")


def test_cancelling_frees_everything_at_once(open_tiny: OpenTiny) -> None:
    client = open_tiny(num_blocks=20, max_running=2)
    requests = [client.request(PROMPT, max_tokens=200, temperature=1.0) for _ in range(4)]
    events = [client.start(request) for request in requests]
    events[0].get(timeout=120)
    until(lambda: client.engine.stats().num_running == 2)
    assert client.engine.stats().kv_cache_usage > 0
    for request in requests:
        client.engine.cancel(request.id)
    client.engine.cancel("nobody")
    assert [client.wait(each).last.finish_reason for each in events] == ["cancelled"] * 4
    stats = client.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert len(client.ask(PROMPT).tokens) == 8


def test_the_queue_is_bounded_and_fair_between_clients(open_tiny: OpenTiny) -> None:
    client = open_tiny(max_running=1, max_waiting=10)
    order: list[str] = []
    done = threading.Event()

    def listen(name: str):
        def on_event(event: Event) -> None:
            if event.finish_reason is not None:
                order.append(name)
                if len(order) == 10:
                    done.set()

        return on_event

    for number in range(9):
        client.engine.submit(client.request(PROMPT, client="many", max_tokens=40), listen(f"many {number}"))
    client.engine.submit(client.request(PROMPT, client="one"), listen("one"))
    more = [client.request(PROMPT, client="many", max_tokens=1) for _ in range(12)]
    with pytest.raises(QueueFullError, match="waiting"):
        any(client.engine.submit(request, lambda event: None) for request in more)
    assert done.wait(60)
    assert order.index("one") <= 2
    assert [name for name in order if name != "one"] == [f"many {number}" for number in range(9)]


def test_a_listener_that_fails_harms_nobody_else(open_tiny: OpenTiny, caplog: pytest.LogCaptureFixture) -> None:
    client = open_tiny()

    def fail(event: Event) -> None:
        raise RuntimeError("gone")

    client.engine.submit(client.request(PROMPT), fail)
    assert len(client.ask(PROMPT).tokens) == 8
    assert "its listener failed" in caplog.text


def test_closing_ends_what_is_under_way(open_tiny: OpenTiny) -> None:
    client = open_tiny(max_running=1)
    events = [client.start(client.request(PROMPT, max_tokens=200)) for _ in range(3)]
    client.engine.close()
    assert [client.wait(each).last.finish_reason for each in events] == ["cancelled"] * 3
    with pytest.raises(QueueFullError):
        client.start(client.request(PROMPT))


class FailingRunner:
    block_size, num_blocks = 16, 8

    def run(self, batch):
        raise RuntimeError("the device is gone")

    def close(self) -> None:
        pass


def test_an_engine_that_breaks_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    client = Client(LocalEngine(FailingRunner(), CONFIGS["llama"], EngineConfig(), max_context=64))
    answer = client.ask(PROMPT)
    assert answer.last.finish_reason == "error"
    assert "internal error" in (answer.last.error or "")
    with pytest.raises(QueueFullError, match="internal error"):
        client.start(client.request(PROMPT))
    client.engine.close()
    assert "the device is gone" in str(ended[0].exc_value)


@pytest.mark.network
def test_smollm2_answers(smollm2_path: Path) -> None:
    """The real file, its packed weights used as they are."""
    engine, tokenizer, config = open_engine(smollm2_path, EngineConfig(num_threads=2))
    assert tokenizer is not None
    messages = [{"role": "user", "content": "Name the capital of France."}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages))
    answer = Client(engine).ask(prompt, max_tokens=20, stop_ids=frozenset(tokenizer.eos_ids))  # pyright: ignore
    engine.close()
    assert "Paris" in tokenizer.decode(answer.tokens)
    assert answer.last.finish_reason == "stop"
    assert (engine.max_context, engine.vocab_size) == (config.max_position_embeddings, config.vocab_size)


@pytest.mark.network
def test_smollm2_in_fp32_answers_as_the_plain_loop(smollm2_path: Path) -> None:
    """The loop itself equals transformers (tests/models); bench/greedy_transformers.py compares 20 x 100 tokens."""
    module, tokenizer = load(smollm2_path)
    assert tokenizer is not None
    engine, _, _ = open_engine(smollm2_path, EngineConfig(num_threads=2, dtype="fp32"))
    client = Client(engine)  # pyright: ignore[reportArgumentType]
    prompts = [tokenizer.encode(text) for text in ("Once upon a time", "def fibonacci(n):")]
    started = [client.start(client.request(prompt, max_tokens=16)) for prompt in prompts]
    answers = [client.wait(events).tokens for events in started]
    engine.close()
    assert answers == [list(generate(module, prompt, max_tokens=16)) for prompt in prompts]


def test_nothing_is_left_after_a_wild_crowd(open_tiny: OpenTiny) -> None:
    """Requests of all kinds, cancelled at random moments, in a cache that is far too small."""
    rng = np.random.default_rng(3)
    client = open_tiny(num_blocks=17, max_running=9, max_step_tokens=19, speculator=Lookup(in_text=True))
    under_way = []
    for number in range(150):
        prompt = PROMPT[: rng.integers(1, 37)] * int(rng.integers(1, 4))
        request = client.request(
            prompt,
            client=f"client {number % 3}",
            prediction=PROMPT[:5] if number % 4 == 0 else (),
            max_tokens=int(rng.integers(1, 60)),
            temperature=float(rng.choice([0.0, 1.0])),
            num_logprobs=1 if number % 5 == 0 else None,
            prompt_logprobs=number % 7 == 0,
            stop_ids=frozenset(rng.integers(0, 101, 3).tolist()),
        )
        under_way.append((request, client.start(request)))
        if number % 3 == 0:
            client.engine.cancel(under_way[int(rng.integers(len(under_way)))][0].id)
        time.sleep(float(rng.choice([0.0, 0.001])))
    reasons = set()
    for request, events in under_way:
        answer = client.wait(events)
        reasons.add(answer.last.finish_reason)
        assert len(answer.tokens) <= request.sampling.max_tokens
        assert answer.last.usage is not None
        assert answer.last.usage.num_completion_tokens == len(answer.tokens)
        if request.sampling.num_logprobs is not None:
            assert len(answer.logprobs) == len(answer.tokens)
        if request.sampling.prompt_logprobs and answer.tokens:
            assert len(answer.prompt_logprobs) == len(request.prompt)
        assert events.empty()
    assert reasons == {"stop", "length", "cancelled"}
    assert client.engine.num_preemptions > 0
    stats = client.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
