"""The C pass and its definition agree to the bit, and both are AdamW."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.errors import UserError
from openwafer.kernels.adamw import AdamWStep, Halves, adamw, adamw_reference
from openwafer.kernels.compiled import library
from openwafer.memoryx.wire import merge, split

STEP = AdamWStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, step=1)


def arrays(seed: int, size: int, dtype: torch.dtype) -> Halves:
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(size, generator=generator) * 10 ** torch.empty(size).uniform_(-6, 3, generator=generator)
    wire, remainder = split(master)
    m = torch.randn(size, generator=generator)
    v = torch.rand(size, generator=generator) * 1e-3
    return Halves(wire, remainder, m, v, torch.randn(size, generator=generator).to(dtype), 0.1 * (seed % 2))


@pytest.mark.skipif(library("adamw") is None, reason="no C compiler")
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 3000) | st.just(70_000), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    step=st.integers(1, 10_000),
    threads=st.integers(1, 3),
    factor=st.sampled_from([1.0, 0.125, 0.3]),
    divisor=st.sampled_from([7.0, 16384.0, 2.0**-20, 2.0**120]),
)
@settings(deadline=None)
def test_the_c_pass_is_the_definition(
    seed: int, sizes: list[int], dtype: torch.dtype, step: int, threads: int, factor: float, divisor: float
) -> None:
    numbers = AdamWStep(lr=3e-3, beta1=0.9, beta2=0.999, eps=1e-8, step=step, divisor=divisor, factor=factor)
    fast = [arrays(seed + k, size, dtype) for k, size in enumerate(sizes)]
    slow = [arrays(seed + k, size, dtype) for k, size in enumerate(sizes)]
    assert adamw(fast, numbers, threads=threads)
    for ours, theirs in zip(fast, slow, strict=True):
        assert adamw_reference(theirs, numbers)
        for a, b in zip(ours[:5], theirs[:5], strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("has_library", [True, False])
def test_the_new_state_can_go_elsewhere(has_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_library:
        monkeypatch.setattr("openwafer.kernels.adamw.library", lambda name: None)
    old, same, kept = (arrays(3, 70_001, torch.bfloat16) for _ in range(3))
    other = Halves(*(torch.empty_like(t) for t in old[:5]), 0.0)
    assert adamw([old], STEP, to=[other])
    assert adamw([same], STEP)
    for before, untouched, new, expected in zip(kept[:4], old[:4], other[:4], same[:4], strict=True):
        assert torch.equal(before.view(torch.int16), untouched.view(torch.int16))
        assert torch.equal(new.view(torch.int16), expected.view(torch.int16))


def test_it_is_adamw() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5000))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    wire, remainder = split(weight.detach())
    m, v = torch.zeros(5000), torch.zeros(5000)
    for step in range(1, 21):
        gradient = torch.randn(5000)
        numbers = AdamWStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, step=step)
        assert adamw([Halves(wire, remainder, m, v, gradient, 0.1)], numbers)
        weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(merge(wire, remainder), weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_weight_that_overflows_is_reported() -> None:
    wire, remainder = split(torch.tensor([1.0, 2.0]))
    gradient = torch.tensor([float("nan"), 1.0])
    assert not adamw([Halves(wire, remainder, torch.zeros(2), torch.zeros(2), gradient, 0.1)], STEP)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_halves_are_exact(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    if (master.view(torch.int32) & 0x7FFFFFFF).max() >= 0x7F7F8000:
        return  # rounds up to infinity on the wire; see the test below
    wire, remainder = split(master)
    assert torch.equal(merge(wire, remainder).view(torch.int32), master.view(torch.int32))
    assert torch.isfinite(wire).all()


def test_the_largest_numbers_survive_even_if_their_wire_does_not() -> None:
    master = torch.tensor([3.4e38, -3.4e38])
    assert torch.equal(merge(*split(master)), master)


def test_non_finite_weights_are_refused() -> None:
    with pytest.raises(UserError, match="not finite"):
        split(torch.tensor([1.0, float("inf")]))
