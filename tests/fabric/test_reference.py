"""The rules of the machine, on the reference: costs, routes, switches, errors."""

import numpy as np
import pytest

from openwafer.errors import UserError
from openwafer.fabric import EAST, RAMP, WEST, ArchitectureError, Fault, Layout, Op, ProgramBuilder, Rect, Simulation
from openwafer.fabric.isa import MAX_LENGTH
from openwafer.systems import WSE2, WSE3


def two_pes(left, right, *, outputs=EAST) -> Simulation:
    layout = Layout(WSE2, 2, 1)
    layout.route(0, Rect(0, 0), RAMP, outputs)
    layout.route(0, Rect(1, 0), WEST, RAMP)
    layout.place(left, Rect(0, 0))
    layout.place(right, Rect(1, 0))
    return Simulation(layout, engine="reference")


def send(pe: ProgramBuilder, length: int = 196) -> None:
    x = pe.array("x", length)
    with pe.task("main", start=True):
        pe.mov(pe.send(0), x)


def receive(pe: ProgramBuilder, length: int = 196) -> None:
    y = pe.array("y", length)
    with pe.task("main", start=True):
        pe.mov(y, pe.receive(0))


@pytest.mark.parametrize(
    ("length", "bank", "shift", "cycles"),
    # Measured by the vendor's simulator: 5130, 10254 and 1034, 2062; 2597 for the fastest placement.
    [(5124, 2, 0, 2568), (5124, 0, 0, 5130), (5124, 0, 1, 10254), (1028, 0, 0, 1034), (1028, 0, 1, 2062)],
)
def test_multiply_accumulates_cost_what_the_banks_allow(length: int, bank: int, shift: int, cycles: int) -> None:
    def program(pe: ProgramBuilder) -> None:
        a = pe.array("a", length + shift, bank=0)
        c = pe.array("c", length + shift, bank=bank)
        factor = pe.register()
        with pe.task("main", start=True):
            pe.mac(c[shift:], a[shift:], factor)

    layout = Layout(WSE2, 1, 1)
    layout.place(program)
    report = Simulation(layout, engine="reference").run()
    assert report.cycles == WSE2.costs.task_start + cycles


def test_a_send_of_196_words_takes_201_cycles_and_six_more_to_the_next_core() -> None:
    simulation = two_pes(send, receive)
    simulation.write("x", np.arange(196))
    report = simulation.run()
    assert report.cycles == WSE2.costs.task_start + 201 + 6
    np.testing.assert_array_equal(simulation.read("y")[0], np.arange(196))


def test_a_slow_receiver_holds_the_sender_back() -> None:
    def late(pe: ProgramBuilder) -> None:
        y, big = pe.array("y", 196), pe.array("big", 4000)
        with pe.task("main", start=True):
            pe.mov(big, big)
            pe.mov(y, pe.receive(0))

    report = two_pes(send, late).run()
    assert report.cycles == 2 * 0 + WSE2.costs.task_start + 2006 + 5 + 196


def test_deadlock_names_the_pe_and_the_colour() -> None:
    def short(pe: ProgramBuilder) -> None:
        send(pe, 100)

    with pytest.raises(
        ArchitectureError, match=r"PE \(1, 0\).*deadlock.*waits for 96 more words of colour 0$"
    ) as caught:
        two_pes(short, receive).run()
    assert caught.value.fault is Fault.DEADLOCK


def test_words_that_nobody_reads_are_an_error() -> None:
    def idle(pe: ProgramBuilder) -> None:
        pe.receive(0)
        with pe.task("main", start=True):
            pe.set(pe.register(), 1)

    with pytest.raises(ArchitectureError) as caught:
        two_pes(lambda pe: send(pe, 3), idle).run()
    assert caught.value.fault is Fault.STRANDED


def test_one_colour_from_two_sides_in_one_cycle_is_an_error() -> None:
    layout = Layout(WSE2, 3, 1)
    layout.route(0, Rect(0, 0), RAMP, EAST)
    layout.route(0, Rect(1, 0), (WEST, RAMP), EAST)
    layout.route(0, Rect(2, 0), WEST, RAMP)
    layout.place(send, Rect(0, 0, 2))
    layout.place(receive, Rect(2, 0), length=392)
    with pytest.raises(ArchitectureError, match=r"PE \(1, 0\).*two inputs in one cycle"):
        Simulation(layout, engine="reference").run()


@pytest.mark.parametrize("engine", ["reference", "c"])
def test_memory_out_of_bounds_stops_at_the_instruction(engine: str) -> None:
    def program(pe: ProgramBuilder) -> None:
        x = pe.array("x", 4)
        offset = pe.param("offset")
        with pe.task("main", start=True):
            pe.add(x, x, x)
            pe.add(x.at(offset), x, x)

    layout = Layout(WSE2, 2, 1)
    layout.place(program)
    layout.param("offset", np.array([[0, 4]]))
    with pytest.raises(ArchitectureError, match=r"PE \(1, 0\), cycle \d+: instruction 1 ") as caught:
        Simulation(layout, engine=engine).run()  # pyright: ignore[reportArgumentType]
    assert str(caught.value).endswith(
        "(ADD in task 'main' of 'program') reaches outside the PE's memory or between elements, "
        "or has more than 49152 elements: "
        "array 'x' is moved by 4 bytes"
    )


@pytest.mark.parametrize("engine", ["reference", "c"])
def test_an_instruction_has_a_longest_length_and_a_loop_has_none(engine: str) -> None:
    def program(pe: ProgramBuilder) -> None:
        number, got = pe.param("number"), pe.register()
        with pe.task("main", start=True):
            pe.mov(got, pe.receive(0), length=1, dtype="f32", thread=0)  # never comes: no step may run ahead of it
            with pe.loop(MAX_LENGTH + 1, overhead=0):
                pass
            pe.mov(pe.send(0), number, length=number, dtype="i32")

    for number, message in ((MAX_LENGTH, "deadlock"), (MAX_LENGTH + 1, "instruction 3 .* more than 49152 elements")):
        layout = Layout(WSE2, 1, 1)
        layout.place(program)
        layout.route(0, None, RAMP, RAMP)
        layout.param("number", number)
        with pytest.raises(ArchitectureError, match=message):
            Simulation(layout, engine=engine).run()  # pyright: ignore[reportArgumentType]


def test_wavelets_with_zero_are_not_sent_and_tasks_run_per_wavelet() -> None:
    def sparse(pe: ProgramBuilder) -> None:
        x = pe.array("x", 64, "f16")
        with pe.task("main", start=True):
            pe.mov(pe.send(0), x, skip_zeros=True)

    def count(pe: ProgramBuilder) -> None:
        number, word, seen = pe.array("number", 1, "i32"), pe.register(), pe.register()
        with pe.task("each", on=pe.receive(0), word=word):
            pe.scalar(Op.IADD, seen, seen, 1)
            pe.store(number, seen)

    values = np.zeros(64)
    values[[3, 9, 40]] = [1.5, -2, 7]
    cycles = []
    for kept in (1, 3):
        simulation = two_pes(sparse, count)
        simulation.write("x", np.where(np.cumsum(values != 0) <= kept, values, 0))
        cycles.append(simulation.run().cycles)
        assert simulation.read("number")[0, 0] == kept
    assert cycles[1] - cycles[0] == 2 * (WSE2.costs.task_start + 2)


def test_layouts_that_lose_wavelets_are_refused() -> None:
    layout = Layout(WSE3, 2, 1)
    layout.place(lambda pe: send(pe, 4), Rect(0, 0))
    with pytest.raises(UserError, match="colour 0 is sent, but no route takes it from the RAMP"):
        Simulation(layout)
    layout.route(0, Rect(0, 0), RAMP, EAST)
    with pytest.raises(UserError, match="leaves to the EAST, where no route takes it"):
        Simulation(layout)


def test_a_pe_has_only_its_memory() -> None:
    layout = Layout(WSE2, 1, 1)
    with pytest.raises(UserError, match="a PE of wse2 has 49152"):
        layout.place(lambda pe: pe.array("x", 20_000))
