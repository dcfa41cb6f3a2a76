import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openwafer.config import parse
from openwafer.errors import UserError
from openwafer.train.schedule import PartConfig, ScheduleConfig


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
    kind=st.sampled_from(["linear", "cosine"]),
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


@given(
    kind=st.sampled_from(["linear", "cosine"]),
    warmup=st.integers(1, 100),
    more=st.integers(1, 200),
    min_ratio=st.floats(0, 1),
)
def test_no_jump_where_the_warm_up_ends(kind, warmup, more, min_ratio):
    values = rates(warmup + more, kind=kind, warmup_steps=warmup, min_ratio=min_ratio)
    assert values[warmup - 1] == values[warmup] == pytest.approx(1)
    # Neither shape falls faster than pi / 2 over its length.
    assert all(abs(a - b) <= max(1 / warmup, 1.6 / more) + 1e-12 for a, b in itertools.pairwise(values))


def test_piecewise():
    pieces = ((0, 1.0), (3, 0.5), (5, 0.1))
    assert rates(6, kind="piecewise", pieces=pieces) == [1, 1, 1, 0.5, 0.5, 0.1, 0.1]
    warm = rates(6, kind="piecewise", pieces=pieces, warmup_steps=4)
    assert warm == pytest.approx([0.25, 0.5, 0.75, 0.5, 0.5, 0.1, 0.1]), "its steps are those of the run"


def test_a_sequence():
    parts = [
        {"kind": "linear", "steps": 2, "start": 0.0, "end": 1.0},
        {"kind": "constant", "steps": 2},
        {"kind": "cosine", "steps": 2, "end": 0.5},
        {"kind": "linear", "end": 0.0},
    ]
    config = parse(ScheduleConfig, {"kind": "sequence", "parts": parts}, "schedule")
    schedule = config.build(10)
    expected = [0, 0.5, 1, 1, 1, 0.75, 0.5, 0.375, 0.25, 0.125, 0, 0, 0]
    assert [schedule(step) for step in range(13)] == pytest.approx(expected)


@given(
    st.lists(
        st.tuples(st.sampled_from(["linear", "cosine"]), st.integers(1, 20), st.floats(0, 3)), min_size=1, max_size=6
    )
)
def test_a_sequence_is_continuous_and_within_its_factors(parts):
    config = ScheduleConfig(
        kind="sequence", parts=tuple(PartConfig(kind=kind, steps=steps, end=end) for kind, steps, end in parts)
    )
    schedule, factors = config.build(1), [1.0, *(end for _, _, end in parts)]
    border = 0
    for start, (_, steps, end) in zip(factors, parts, strict=False):
        values = [schedule(step) for step in range(border, border + steps + 1)]
        border += steps
        assert values[0] == pytest.approx(start, abs=1e-12)
        assert values[-1] == pytest.approx(end, abs=1e-12)
        low, high = sorted((start, end))
        assert all(low - 1e-12 <= value <= high + 1e-12 for value in values)
    assert schedule(border + 1000) == pytest.approx(factors[-1])


def test_mistakes():
    with pytest.raises(UserError, match="warmup_steps 11 is more than the schedule's 10 steps"):
        ScheduleConfig(warmup_steps=11).build(10)
    with pytest.raises(UserError, match=r"lr\.kind must be one of constant, linear, cosine, piecewise, sequence"):
        parse(ScheduleConfig, {"kind": "cosin"}, "lr")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "piecewise"}, "pieces must start at step 0"),
        ({"kind": "piecewise", "pieces": [[5, 1.0]]}, "pieces must start at step 0"),
        ({"kind": "piecewise", "pieces": [[0, 1.0], [7, 0.1], [7, 0.2]]}, r"must rise, got \[0, 7, 7\]"),
        ({"kind": "piecewise", "pieces": [[0, -1.0]]}, r"pieces\[0\]\[1\] must be at least 0"),
        ({"kind": "piecewise", "pieces": [[0]]}, r"pieces\[0\] must be a list of 2 values"),
        ({"kind": "cosine", "pieces": [[0, 1.0]]}, "pieces does nothing with kind: cosine; it belongs to piecewise"),
        ({"kind": "sequence"}, "needs parts"),
        (
            {"kind": "sequence", "warmup_steps": 3, "parts": [{"end": 0}]},
            "warmup_steps does nothing with kind: sequence",
        ),
        ({"kind": "sequence", "parts": [{"end": 0}, {"end": 1}]}, "part 1 of the schedule needs `steps`"),
        ({"kind": "sequence", "parts": [{"kind": "linear"}]}, "a linear part needs `end`"),
        ({"kind": "sequence", "parts": [{"kind": "constant", "end": 0.5}]}, "a constant part has one factor"),
        ({"kind": "sequence", "parts": [{"kind": "cosine", "end": 0.5, "steps": 0}]}, "steps must be at least 1"),
    ],
)
def test_mistakes_in_lists(values, message):
    with pytest.raises(UserError, match=message):
        parse(ScheduleConfig, values)
