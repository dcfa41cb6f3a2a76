"""Errors of a run say what was lacking and where, and both machines say the same."""

import pytest

from openwafer.fabric import EAST, RAMP, WEST, ArchitectureError, Fault, Layout, ProgramBuilder, Rect, Simulation
from openwafer.systems import WSE2

ENGINES = ["reference", "c"]


def send(pe: ProgramBuilder, *, colour: int, length: int) -> None:
    x = pe.array("x", length)
    with pe.task("main", start=True):
        pe.mov(pe.send(colour), x)


def forward(pe: ProgramBuilder, *, length: int) -> None:
    with pe.task("main", start=True):
        pe.mov(pe.send(1), pe.receive(0), length=length, dtype="f32")


def receive(pe: ProgramBuilder, *, length: int) -> None:
    y = pe.array("y", length)
    with pe.task("main", start=True):
        pe.mov(y, pe.receive(1))


def idle(pe: ProgramBuilder) -> None:
    pe.receive(1)
    with pe.task("main", start=True):
        pe.set(pe.register(), 1)


def error_of(layout: Layout, engine: str) -> ArchitectureError:
    with pytest.raises(ArchitectureError) as caught:
        Simulation(layout, engine=engine).run()  # pyright: ignore[reportArgumentType]
    return caught.value


@pytest.mark.parametrize("engine", ENGINES)
def test_a_deadlock_says_how_many_words_are_lacking_and_who_else_is_stuck(engine: str) -> None:
    layout = Layout(WSE2, 3, 1)
    layout.place(send, Rect(0, 0), colour=0, length=4)
    layout.place(forward, Rect(1, 0), length=5)
    layout.place(receive, Rect(2, 0), length=7)
    for colour in (0, 1):
        layout.route(colour, Rect(colour, 0), RAMP, EAST)
        layout.route(colour, Rect(colour + 1, 0), WEST, RAMP)
    error = error_of(layout, engine)
    assert error.fault is Fault.DEADLOCK
    assert (error.pe, error.detail) == ((1, 0), 0)
    assert str(error).endswith("waits for 1 more word of colour 0; 1 other PE is stuck too, the first is (2, 0)")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_instruction_that_has_words_and_no_room_names_the_colour_it_sends(engine: str) -> None:
    layout = Layout(WSE2, 4, 1)
    layout.place(forward, Rect(0, 0), length=196)  # from PE 1, and back through it to PE 2, which does not receive
    layout.place(send, Rect(1, 0), colour=0, length=196)
    layout.place(idle, Rect(2, 0))
    layout.route(0, Rect(1, 0), RAMP, WEST)
    layout.route(0, Rect(0, 0), EAST, RAMP)
    layout.route(1, Rect(0, 0), RAMP, EAST)
    layout.route(1, Rect(1, 0), WEST, EAST)
    layout.route(1, Rect(2, 0), WEST, RAMP)
    error = error_of(layout, engine)
    assert (error.pe, error.detail) == ((0, 0), 1)
    wafer = WSE2  # what fits between: its own queue, the queues and ramps of three routers, and the last core's queue
    held = wafer.output_queue_words[0] + wafer.costs.forward_latency - 1 + 3 * wafer.router_queue_words
    held += wafer.input_queue_words[0] + wafer.ramp_cycles
    assert f"waits for room to send {196 - held} more words of colour 1; 1 other PE is stuck" in str(error)
    assert str(error).endswith("the first is (1, 0)")


@pytest.mark.parametrize("engine", ENGINES)
def test_out_of_bounds_names_task_array_and_registers(engine: str) -> None:
    def program(pe: ProgramBuilder) -> None:
        pe.array("w", 2)
        x, by, length = pe.array("x", 4), pe.register(), pe.register()
        with pe.task("first", start=True):
            pe.set(by, -16)
            pe.set(length, 3)
            pe.activate("second")
        with pe.task("second"):
            pe.mov(x[1:].at(by), x[:3], length=length)

    layout = Layout(WSE2, 1, 1)
    layout.place(program)
    assert str(error_of(layout, engine)).endswith(
        "instruction 4 (MOV in task 'second' of 'program') reaches outside the PE's memory or between elements, "
        "or has more than 49152 elements: "
        "array 'x' is moved by -16 bytes, its length is 3"
    )
