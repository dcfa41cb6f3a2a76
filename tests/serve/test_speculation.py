"""Guessing ahead: answers stay the same, bit for bit, and good guesses save steps."""

import numpy as np
import pytest

from openwafer.serve.core import Request, Sampling
from openwafer.serve.native import NativeRunner
from openwafer.serve.runner import Batch
from openwafer.serve.sequence import Sequence
from openwafer.serve.speculation import DraftModel, Lookup
from tests.serve.conftest import CONFIGS, Answer, Client, OpenTiny, tiny_program

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]
DRAWN = {"temperature": 0.8, "seed": 11, "num_logprobs": 1, "max_tokens": 30}


class Counting:
    """A runner that counts its steps."""

    def __init__(self, runner) -> None:
        self._runner = runner
        self.block_size, self.num_blocks = runner.block_size, runner.num_blocks
        self.num_steps = 0

    def run(self, batch: Batch) -> np.ndarray:
        self.num_steps += 1
        return self._runner.run(batch)

    def close(self) -> None:
        self._runner.close()


def counted(client: Client) -> Counting:
    client.engine._runner = Counting(client.engine._runner)  # pyright: ignore[reportPrivateUsage]
    return client.engine._runner  # pyright: ignore[reportPrivateUsage]


def bits(answer: Answer) -> tuple[list[int], bytes]:
    return answer.tokens, np.array([entry.logprob for entry in answer.logprobs]).tobytes()


def draft(seed_of: str = "llama") -> DraftModel:
    runner = NativeRunner(tiny_program(CONFIGS[seed_of]), num_blocks=32, max_rows=32, half_cache=False, num_threads=1)
    return DraftModel(runner, max_rows=32, max_context=256)


def sequence(tokens: list[int], prediction: tuple[int, ...] = (), num_prompt: int | None = None) -> Sequence:
    prompt = tuple(tokens[:num_prompt])
    request = Request(id="", prompt=prompt, sampling=Sampling(max_tokens=9), prediction=prediction)
    made = Sequence(request=request, on_event=lambda event: None, seed=0, submitted_s=0.0, order=0)
    made.tokens = list(tokens)
    return made


def test_lookup_finds_what_followed_before() -> None:
    lookup = Lookup(in_text=True)
    assert lookup.guess([sequence([1, 2, 3, 4, 9, 2, 3])], 2) == [[4, 9]]
    assert lookup.guess([sequence([1, 2, 3])], 2) == [[]]
    # The longest run of tokens decides, then the last place.
    assert lookup.guess([sequence([1, 2, 3, 7, 8, 2, 3, 6, 5, 1, 2, 3])], 1) == [[7]]
    assert lookup.guess([sequence([2, 3, 7, 2, 3, 6, 2, 3])], 1) == [[6]]
    # Bytes of neighbouring tokens that happen to look like the tokens are not them.
    assert lookup.guess([sequence([0x0201, 0x0100, 0, 9, 0x0201 << 8, 1])], 3) == [[]]


def test_a_prediction_is_followed_from_the_start_and_found_again() -> None:
    lookup = Lookup(in_text=False)
    prediction = (50, 51, 52, 53, 54, 55)
    assert lookup.guess([sequence([1, 2], prediction)], 3) == [[50, 51, 52]]
    assert lookup.guess([sequence([1, 2, 50, 51], prediction, num_prompt=2)], 3) == [[52, 53, 54]]
    assert lookup.guess([sequence([1, 2, 90, 53], prediction, num_prompt=2)], 3) == [[54, 55]]
    assert lookup.guess([sequence([7, 8, 9, 7, 8])], 3) == [[]]


@pytest.mark.parametrize("kind", ["lookup", "draft", "other draft"])
@pytest.mark.parametrize("sampling", [DRAWN, DRAWN | {"temperature": 0.0}])
def test_answers_are_the_same_with_guesses(open_tiny: OpenTiny, kind: str, sampling: dict) -> None:
    plain = open_tiny().ask(PROMPT, **sampling)
    speculator = Lookup(in_text=True) if kind == "lookup" else draft("qwen3" if kind == "other draft" else "llama")
    client = open_tiny(speculator=speculator, num_draft_tokens=4)
    runner = counted(client)
    assert bits(client.ask(PROMPT, **sampling)) == bits(plain)
    if kind == "draft":
        assert runner.num_steps <= 8  # the model guesses itself: five tokens a step
        stats = client.engine.stats()
        assert 20 <= stats.num_right_tokens < stats.num_generated_tokens
        assert stats.num_right_tokens <= stats.num_guessed_tokens <= stats.num_right_tokens + 4


def test_guesses_hold_in_a_crowd(open_tiny: OpenTiny) -> None:
    prompts = [PROMPT + [number] * (number % 5) for number in range(12)]
    plain = open_tiny()
    expected = [bits(plain.ask(prompt, **DRAWN)) for prompt in prompts]
    client = open_tiny(speculator=Lookup(in_text=True), num_blocks=14, max_step_tokens=16)
    answers = [client.start(client.request(prompt, **DRAWN)) for prompt in prompts]
    assert [bits(client.wait(events)) for events in answers] == expected
    assert client.engine.stats().kv_cache_usage == 0


def test_a_right_prediction_saves_steps_and_is_counted(open_tiny: OpenTiny) -> None:
    plain = open_tiny().ask(PROMPT, **DRAWN)
    client = open_tiny(num_draft_tokens=8)
    runner = counted(client)
    answer = client.wait(client.start(client.request(PROMPT, prediction=plain.tokens, **DRAWN)))
    assert bits(answer) == bits(plain)
    assert runner.num_steps <= 6
    usage = answer.last.usage
    assert usage is not None
    assert usage.num_accepted_prediction_tokens >= 20
    wrong = client.wait(client.start(client.request(PROMPT, prediction=[*plain.tokens[:5], *[100] * 9], **DRAWN)))
    assert bits(wrong) == bits(plain)
    assert wrong.last.usage is not None
    assert wrong.last.usage.num_rejected_prediction_tokens > 0
