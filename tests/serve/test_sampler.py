"""Drawing a token: against slow, obvious versions of the same rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.serve.core import Sampling
from openwafer.serve.sampler import SamplingError, draw, logprobs_of, uniform

LOGITS = (np.random.default_rng(0).standard_normal(300) * 3).astype(np.float32)


def sampling(**options) -> Sampling:
    return Sampling(**{"max_tokens": 10} | options)


def plain_candidates(logits: np.ndarray, options: Sampling) -> set[int]:
    """min_p, then top_k, then top_p, by sorting everything."""
    weights = np.exp((logits - logits.max()) / np.float32(options.temperature))
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    order = [i for i in order if weights[i] >= options.min_p]
    order = order[: options.top_k]
    mass = sum(float(weights[i]) for i in order)
    kept, before = set(), 0.0
    for i in order:
        if before >= options.top_p * mass and kept:
            break
        kept.add(i)
        before += float(weights[i])
    return kept


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.1, 3),
    top_p=st.sampled_from([0.01, 0.3, 0.77, 0.95, 1.0]),
    top_k=st.sampled_from([None, 1, 5, 60, 1000]),
    min_p=st.sampled_from([0.0, 0.03, 0.5]),
)
def test_only_what_the_limits_leave_is_drawn(
    seed: int, temperature: float, top_p: float, top_k: int | None, min_p: float
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(200) * 2).astype(np.float32)
    options = sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    drawn = {draw(logits, options, seed, place, {}) for place in range(40)}
    assert drawn <= plain_candidates(logits, options)


def test_tokens_come_as_often_as_they_are_likely() -> None:
    options = sampling(temperature=1.5, top_k=6)
    kept = sorted(plain_candidates(LOGITS, options))
    expected = np.exp(LOGITS[kept] / 1.5)
    expected /= expected.sum()
    count = 4000
    drawn = [draw(LOGITS, options, 5, place, {}) for place in range(count)]
    shares = np.array([drawn.count(token) / count for token in kept])
    assert np.abs(shares - expected).max() < 4 * 0.5 / count**0.5


def test_randomness_is_a_function_of_seed_and_place() -> None:
    values = [uniform(seed, place) for seed in range(50) for place in range(50)]
    assert values[7 * 50 + 3] == uniform(7, 3)
    assert len(set(values)) == 2500
    assert abs(np.mean(values) - 0.5) < 0.03
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals() -> None:
    logits = np.array([1, 5, 5, 2], np.float32)
    assert draw(logits, sampling(temperature=0.0), 0, 0, {}) == 1
    assert draw(logits, sampling(temperature=1e-30), 0, 0, {}) in (1, 2)


def test_penalties_and_bias() -> None:
    logits = np.array([3.0, 2.9, 2.8, 0.0], np.float32)
    greedy = {"temperature": 0.0}
    assert draw(logits, sampling(**greedy, presence_penalty=0.15), 0, 1, {0: 1}) == 1
    assert draw(logits, sampling(**greedy, presence_penalty=0.05), 0, 1, {0: 1}) == 0
    assert draw(logits, sampling(**greedy, frequency_penalty=0.05), 0, 3, {0: 3}) == 1
    assert draw(logits, sampling(**greedy, frequency_penalty=0.05), 0, 3, {0: 1}) == 0
    assert draw(logits, sampling(**greedy, logit_bias={3: 100.0}), 0, 0, {}) == 3
    assert draw(logits, sampling(**greedy, logit_bias={0: -100.0}), 0, 0, {}) == 1
    assert logits[0] == 3.0  # the row belongs to the runner


def test_a_mask_and_min_tokens_forbid() -> None:
    logits = np.arange(20, dtype=np.float32)
    greedy = sampling(temperature=0.0)
    assert draw(logits, greedy, 0, 0, {}, mask=bytes([0b100, 0b1000, 0])) == 11
    waiting = sampling(temperature=0.0, min_tokens=2, stop_ids=frozenset([19, 18, 99]))
    assert [draw(logits, waiting, 0, place, {}) for place in (0, 1, 2)] == [17, 17, 19]


@pytest.mark.parametrize(
    ("logits", "mask"), [([1.0, 2.0], b"\x00"), ([float("nan"), 1.0], None), ([1.0, float("inf")], None)]
)
def test_nothing_to_draw_is_an_error(logits: list[float], mask: bytes | None) -> None:
    with pytest.raises(SamplingError):
        draw(np.array(logits, np.float32), sampling(), 0, 0, {}, mask)


def test_logprobs_with_the_likeliest() -> None:
    logits = LOGITS[None].copy()
    logits[0, [3, 9]] = 20.0  # equal ones come by id
    (entry,) = logprobs_of(logits, [5], 3)
    wide = logits[0].astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum())
    assert entry.logprob == pytest.approx(expected[5], abs=1e-9)
    assert [token for token, _ in entry.top][:2] == [3, 9]
    assert [p for _, p in entry.top] == pytest.approx(sorted(expected)[::-1][:3], abs=1e-9)
    assert logprobs_of(logits, [5], 0)[0].top == ()
