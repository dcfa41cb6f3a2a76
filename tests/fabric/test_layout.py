"""Layouts say what is wrong with them, before the start and while they are made."""

import numpy as np
import pytest

from openwafer.errors import UserError
from openwafer.fabric import EAST, RAMP, WEST, Layout, ProgramBuilder, Rect, Simulation
from openwafer.systems import WSE2


def send(pe: ProgramBuilder, *, length: int = 4) -> None:
    x = pe.array("x", length)
    with pe.task("main", start=True):
        pe.mov(pe.send(0), x)


def receive(pe: ProgramBuilder) -> None:
    y = pe.array("y", 4)
    with pe.task("main", start=True):
        pe.mov(y, pe.receive(0))


def test_a_receive_needs_a_route_into_the_ramp() -> None:
    layout = Layout(WSE2, 3, 1)
    layout.place(receive, Rect(0, 0))
    with pytest.raises(UserError) as caught:
        Simulation(layout, engine="reference")
    assert str(caught.value) == "PE (0, 0): colour 0 is received, but no route takes it to the RAMP"
    layout.place(receive)
    with pytest.raises(UserError, match=r"is received, but .* to the RAMP; 3 PEs are wrong in this way$"):
        Simulation(layout, engine="reference")


def test_a_pe_has_one_program() -> None:
    layout = Layout(WSE2, 3, 1)
    layout.place(send, Rect(0, 0, 2))
    layout.place(send, Rect(1, 0))  # the same again
    for where in (Rect(1, 0, 2), np.array([[False, True, True]])):
        with pytest.raises(UserError, match=r"^PE \(1, 0\): has a program already: place one on each PE$"):
            layout.place(send, where, length=5)
    assert layout.program_of.tolist() == [[0, 0, -1]]


def test_a_colour_has_one_route_in_a_router() -> None:
    layout = Layout(WSE2, 3, 1)
    layout.route(0, Rect(1, 0, 2), WEST, RAMP)
    layout.route(0, Rect(1, 0, 2), WEST, RAMP)  # the same again
    layout.route(1, Rect(1, 0, 2), WEST, EAST)
    with pytest.raises(UserError, match=r"PE \(1, 0\): has another route of colour 0 already: .*; 2 PEs are wrong"):
        layout.route(0, None, WEST, EAST)
    layout.route(0, Rect(0, 0), RAMP, EAST)


def test_directions_are_not_flags() -> None:
    with pytest.raises(UserError, match=r"several directions are a tuple, such as \(WEST, EAST\): got WEST \| EAST"):
        Layout(WSE2, 3, 1).route(0, None, RAMP, WEST | EAST)


@pytest.mark.parametrize("values", [2**31, -(2**31) - 1, 2**63, 2**80, np.array([[0, 2**40, 1]])])
def test_params_that_fit_no_register_are_refused(values: np.ndarray | int) -> None:
    layout = Layout(WSE2, 3, 1)
    with pytest.raises(UserError, match=r"^param 'n': a register holds 32 bits with sign, got -?\d+$"):
        layout.param("n", values)
    assert layout.params == []


def test_params_are_numbers() -> None:
    layout = Layout(WSE2, 3, 1)
    with pytest.raises(UserError, match="param 'n' takes integers or floats, got <U4 "):
        layout.param("n", np.array("four"))
    with pytest.raises(UserError, match="param 'n': a register holds fp32, got 1e\\+60"):
        layout.param("n", 1e60)
    layout.param("n", np.array([[-(2**31), 2**31 - 1, True]]))
    layout.param("n", np.array([[np.inf, np.nan, -1.5]]))
    assert layout.params[0][2].tolist() == [[-(2**31), 2**31 - 1, 1]]
    assert layout.params[1][2].view(np.float32)[0, 2] == -1.5
