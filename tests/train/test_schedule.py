import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openwafer.config import parse
from openwafer.errors import UserError
from openwafer.train.schedule import ScheduleConfig


def rates(num_steps, **config):
    schedule = ScheduleConfig(**config).build(num_steps)
    return [schedule(step) for step in range(num_steps + 1)]


def test_shapes():
    assert rates(4, kind="constant") == [1, 1, 1, 1, 1]
    assert rates(4, kind="linear") == [1, 0.75, 0.5, 0.25, 0]
    assert rates(4, kind="cosine") == pytest.approx([1, 0.85355339, 0.5, 0.14644661, 0])
    assert rates(4, kind="linear", min_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_warm_up_then_decay():
    assert rates(6, kind="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates(3, kind="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1]


def test_the_end_holds_and_total_steps_moves_it():
    schedule = ScheduleConfig(kind="cosine", total_steps=10, min_ratio=0.1).build(1000)
    assert schedule(10) == schedule(999) == pytest.approx(0.1)
    assert schedule(5) == pytest.approx(0.55)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    num_steps=st.integers(1, 300),
    share=st.floats(0, 1),
    min_ratio=st.floats(0, 1),
)
def test_rises_then_falls_within_bounds(kind, num_steps, share, min_ratio):
    warmup = int(share * num_steps)
    values = rates(num_steps, kind=kind, warmup_steps=warmup, min_ratio=min_ratio)
    assert values[:warmup] == sorted(values[:warmup])
    tail = values[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(tail))
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    assert values[0] > 0


def test_mistakes():
    with pytest.raises(UserError, match="warmup_steps 11 is more than the schedule's 10 steps"):
        ScheduleConfig(warmup_steps=11).build(10)
    with pytest.raises(UserError, match=r"lr\.kind must be one of constant, linear, cosine"):
        parse(ScheduleConfig, {"kind": "cosin"}, "lr")
