"""A simulation runs once, on an engine that exists."""

import pytest

from openwafer.errors import UserError
from openwafer.fabric import Layout, ProgramBuilder, Simulation
from openwafer.systems import WSE2


def double(pe: ProgramBuilder) -> None:
    x = pe.array("x", 8)
    with pe.task("main", start=True):
        pe.add(x, x, x)


@pytest.fixture
def layout() -> Layout:
    layout = Layout(WSE2, 1, 1)
    layout.place(double)
    return layout


def test_engines_that_do_not_exist_are_refused(layout: Layout) -> None:
    with pytest.raises(UserError, match="engine must be one of auto, c, reference, got 'fast'"):
        Simulation(layout, engine="fast")  # pyright: ignore[reportArgumentType]


def test_a_second_run_is_refused(layout: Layout) -> None:
    simulation = Simulation(layout, engine="reference")
    simulation.run()
    with pytest.raises(UserError, match="runs once: make a new Simulation"):
        simulation.run()
