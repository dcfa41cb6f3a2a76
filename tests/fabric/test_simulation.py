"""A simulation runs once, on an engine that exists, and takes values that fit, before the run."""

import dataclasses

import numpy as np
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


def test_a_write_after_the_run_is_refused(layout: Layout) -> None:
    simulation = Simulation(layout, engine="reference")
    simulation.write("x", np.ones(8))
    simulation.run()
    with pytest.raises(UserError, match="array 'x' is written after the run: write before it"):
        simulation.write("x", np.zeros(8))
    np.testing.assert_array_equal(simulation.read("x"), np.full((1, 8), 2.0))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("i16", [1e6, 0]), ("i16", [0, -32769]), ("i16", [np.nan, 1]), ("i32", [2**31, 0]), ("i32", [0.0, np.inf])],
)
def test_integers_that_do_not_fit_are_refused(dtype: str, values: list) -> None:
    layout = Layout(WSE2, 1, 1)
    layout.place(lambda pe: pe.array("n", 2, dtype))
    simulation = Simulation(layout, engine="reference")
    with pytest.raises(UserError, match=f"array 'n' of {dtype} holds -"):
        simulation.write("n", np.array(values))
    largest = np.iinfo(simulation.read("n").dtype).max
    simulation.write("n", np.array([largest, -largest - 1]))
    assert simulation.read("n").tolist() == [[largest, -largest - 1]]


def test_io_cycles_of_a_wafer_of_ones_own(layout: Layout) -> None:
    layout.wafer = dataclasses.replace(WSE2, name="mine")
    simulation = Simulation(layout, engine="reference")
    simulation.write("x", np.ones(8))
    assert simulation.io_words == 8
    with pytest.raises(UserError, match="wafer 'mine' are not known, only of wse1, wse2, wse3: give a changed wafer"):
        _ = simulation.io_cycles
    layout.wafer = dataclasses.replace(WSE2, clock_hz=1.1e11)  # by name it is a WSE-2
    assert simulation.io_cycles == round(8 * 32 / 1.2e12 * 1.1e11)
