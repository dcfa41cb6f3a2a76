"""Two threads give the same cycles, values and statistics as one."""

import numpy as np
import pytest

from openwafer.fabric.engine import EngineMachine
from openwafer.fabric.image import Image
from openwafer.fabric.kernels.allreduce import TwoLevel
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.matrices import GemmConfig
from openwafer.fabric.kernels.meshgemm import A_BACK, A_RING, B_RING, place, route_ring
from openwafer.fabric.kernels.reduce import line_program
from openwafer.fabric.kernels.stencil import StencilConfig
from openwafer.fabric.kernels.stencil import place as place_stencil
from openwafer.fabric.layout import Layout
from openwafer.systems import WSE2, WSE3


def stencil() -> Layout:
    layout = Layout(WSE2, 6, 9)
    place_stencil(layout, StencilConfig(width=6, height=9, depth=40, steps=3))
    return layout


def gemm() -> Layout:
    layout = Layout(WSE3, 8, 8)
    route_ring(Axis(layout, "x"), A_RING, backwards=False)
    route_ring(Axis(layout, "x"), A_BACK, backwards=True)
    route_ring(Axis(layout, "y"), B_RING, backwards=False)
    place(layout, GemmConfig(grid=8, size=32, algorithm="mesh"))
    layout.param("shifts_forward", np.arange(8)[:, None] % 3)
    return layout


def columns() -> Layout:
    """Sums that are computed on their way over the border, and a broadcast back."""
    layout = Layout(WSE2, 3, 20)
    axis, collective = Axis(layout, "y"), TwoLevel(20, 7)
    collective.route(axis)
    for index in range(20):
        layout.place(line_program, axis.rect(index), collective=collective, index=index, words=50)
    return layout


@pytest.mark.parametrize("build", [stencil, gemm, columns])
def test_two_threads_agree_with_one(build) -> None:
    results = []
    for num_threads in (1, 2):
        image = Image(build())
        image.memory[:] = np.random.default_rng(1).integers(0, 60, image.memory.size)
        machine = EngineMachine(image, trace=True, num_threads=num_threads)
        cycles = machine.run(10**6)
        spans = sorted(map(tuple, machine.spans.tolist()))
        results.append((cycles, image.memory.tobytes(), machine.status[6:].tolist(), machine.busy.tolist(), spans))
    assert results[0] == results[1]


def test_a_trace_is_cut_only_if_something_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(num_threads: int) -> EngineMachine:
        machine = EngineMachine(Image(stencil()), trace=True, num_threads=num_threads)
        machine.run(10**6)
        return machine

    whole = len(traced(1).spans)
    cases = ((1, whole, False), (1, whole - 1, True), (2, 2 * whole - 2, False), (2, 20, True))
    for num_threads, most, is_cut in cases:
        monkeypatch.setattr("openwafer.fabric.engine.MAX_SPANS", most)
        machine = traced(num_threads)
        assert machine.is_cut == is_cut
        assert len(machine.spans) == min(whole, most)
