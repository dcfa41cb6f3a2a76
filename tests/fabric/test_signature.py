"""Programs that no machine could run are refused while they are built, with what to change."""

from collections.abc import Callable

import numpy as np
import pytest

from openwafer.errors import UserError
from openwafer.fabric import EAST, RAMP, WEST, Layout, Op, ProgramBuilder, Rect, Simulation
from openwafer.systems import WSE2


def build(statement: Callable[[ProgramBuilder, dict], None]) -> None:
    def program(pe: ProgramBuilder) -> None:
        arrays = {"x": pe.array("x", 4), "y": pe.array("y", 8), "h": pe.array("h", 8, "f16")}
        arrays |= {"i": pe.array("i", 4, "i32"), "r": pe.register()}
        with pe.task("main", start=True):
            statement(pe, arrays)

    Layout(WSE2, 1, 1).place(program)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (lambda pe, v: pe.mov(v["x"], pe.receive(24)), "colour must be from 0 to 23, got 24"),
        (lambda pe, v: pe.mov(pe.send(-1), v["x"]), "colour must be from 0 to 23, got -1"),
        (lambda pe, v: pe.wait(8), "thread must be from 0 to 7, got 8"),
        (lambda pe, v: pe.mov(v["x"], pe.receive(0), thread=9), "thread must be from 0 to 7, got 9"),
        (lambda pe, v: pe.add(v["x"], v["x"], v["x"], thread=1), "without fabric operand"),
        (lambda pe, v: pe.add(v["x"], v["x"], v["x"], then="main"), "without fabric operand"),
        (lambda pe, v: pe.add(v["x"], v["y"], v["y"]), "operands of 8 and 4 elements"),
        (lambda pe, v: pe.mov(v["y"], v["x"]), "operands of 4 and 8 elements: slice them .* or say length="),
        (lambda pe, v: pe.add(v["y"], v["x"], v["y"]), "operands of 4 and 8 elements"),
        (lambda pe, v: pe.convert(v["h"], v["x"]), "CONVERT: operands of 4 and 8 elements"),
        (lambda pe, v: pe.mov(v["x"], v["y"], length=5), "length=5, and an operand has 4 elements"),
        (lambda pe, v: pe.mov(v["x"], v["x"], length=2.0), "length must be an integer or a register, got 2.0"),
        (lambda pe, v: v["y"][6:10], "slice bound 10 is outside an array of 8"),
        (lambda pe, v: v["y"][100:104], "slice bound 100 is outside an array of 8"),
        (lambda pe, v: v["y"][2:6][:5], "slice bound 5 is outside an array of 4"),
        (lambda pe, v: v["y"][-9:], "slice bound -9 is outside an array of 8"),
        (lambda pe, v: v["y"][3], r"is a slice, such as \[3:4\], got \[3\]"),
        (lambda pe, v: v["y"].at(5), r"at\(\) takes a register with an offset in bytes, got 5"),
        (lambda pe, v: pe.add(v["x"], v["x"], 1.0), "second source must be memory .* got 1.0: put the number"),
        (lambda pe, v: pe.mov(None, v["x"]), "the destination must be memory .* or a stream or a register, got None"),
        (lambda pe, v: pe.mov(v["x"], "x"), "the first source must be memory .*, got 'x'"),
        (lambda pe, v: pe.mov(v["x"], pe.receive(0), threads=1), "MOV has no option threads=: did you mean thread="),
        (lambda pe, v: pe.mov(v["x"], v["x"], colour=1), "no option colour=: there are length, dtype, thread, then"),
        (lambda pe, v: pe.convert(v["h"], v["r"]), "CONVERT: the source must be memory"),
        (lambda pe, v: pe.tile(v["x"], v["r"], v["x"], m=1, n=1, k=1), "TILE: a must be memory"),
        (lambda pe, v: pe.load(v["r"], v["r"]), "LOAD: the source must be memory"),
        (lambda pe, v: pe.store(v["x"], 3), "STORE: the source must be a register, got 3: put the number"),
        (lambda pe, v: pe.set(v["x"], 3), "SET: the destination must be a register"),
        (lambda pe, v: pe.scalar(Op.IADD, v["r"], v["r"], 1.5), "IADD: the second source must be a register, got 1.5"),
        (lambda pe, v: pe.scalar(Op.IADD, v["r"], v["x"], 1), "IADD: the first source must be a register"),
        (lambda pe, v: pe.loop(2.5).__enter__(), "loop's count is an integer or a register, got 2.5"),
        (lambda pe, v: pe.add(v["x"], v["x"], v["x"], length=-1), "length must be from 0 to 49152, got -1"),
        (lambda pe, v: pe.add(v["y"], v["h"], v["h"]), "operands of f16 and f32: convert one"),
        (lambda pe, v: pe.add(v["x"], v["x"], None), "ADD takes two sources"),
        (lambda pe, v: pe.vector(Op.MOV, v["x"], v["x"], v["x"]), "MOV takes one source"),
        (lambda pe, v: pe.add(v["x"], pe.receive(0), pe.receive(1)), "reads two streams"),
        (lambda pe, v: pe.mac(pe.send(0), v["x"], v["x"]), "MAC adds to its destination"),
        (lambda pe, v: pe.vector(Op.SUM, v["x"], v["x"]), "its destination is a register"),
        (lambda pe, v: pe.vector(Op.CONVERT, pe.send(0), v["x"]), "CONVERT goes from memory to memory"),
        (lambda pe, v: pe.vector(Op.EXP, v["i"], v["i"]), "EXP is for floats, got i32"),
        (lambda pe, v: pe.mov(pe.send(0), v["x"], skip_zeros=True), "skip_zeros is for sends of f16"),
        (lambda pe, v: pe.mov(v["h"], pe.receive(0), skip_zeros=True), "skip_zeros is for sends of f16"),
        (lambda pe, v: pe.tile(v["x"], v["x"], v["x"], m=0, n=1, k=1), "tile sizes must be at least 1"),
        (lambda pe, v: pe.tile(v["x"], v["y"][::2], v["x"], m=2, n=2, k=2), "tile operand a must have 4 elements"),
        (lambda pe, v: pe.set(v["r"], 2**31), "32 bits with sign, got 2147483648"),
        (lambda pe, v: pe.scalar(Op.IADD, v["r"], v["r"], 2**40), "32 bits with sign"),
        (lambda pe, v: pe.scalar(Op.FADD, v["r"], v["r"], 1), "FADD takes registers: put 1 into one"),
        (lambda pe, v: pe.scalar(Op.FEXP, v["r"], v["r"], v["r"]), "FEXP takes one source"),
        (lambda pe, v: pe.scalar(Op.ADD, v["r"], v["r"], v["r"]), "ADD is no instruction over registers"),
        (lambda pe, v: pe.scalar(Op.FADD, v["r"], v["r"], 1.5), "FADD takes registers: put 1.5 into one"),
        (lambda pe, v: pe.scalar(Op.IADD, v["r"], v["r"], 1.5), "second source must be a register, got 1.5: put"),
        (lambda pe, v: pe.vector(Op.TILE, v["x"], v["x"], v["x"]), "TILE is no vector instruction"),
        (lambda pe, v: pe.loop(2**31).__enter__(), "32 bits with sign, got 2147483648"),
        (lambda pe, v: pe.activate("other"), "no task 'other'; there are main"),
        (lambda pe, v: pe.array("empty", 0), "at least one element, got 0"),
        (lambda pe, v: pe.task("inner").__enter__(), "task 'inner' is inside another task"),
    ],
)
def test_what_cannot_run_is_refused(statement: Callable[[ProgramBuilder, dict], None], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(statement)


def test_instructions_belong_into_tasks_with_names_of_their_own() -> None:
    def after(pe: ProgramBuilder) -> None:
        with pe.task("main", start=True):
            pe.set(pe.register(), 1)
        pe.set(pe.register(), 2)

    def twice(pe: ProgramBuilder) -> None:
        for _ in range(2):
            with pe.task("main"):
                pe.set(pe.register(), 1)

    with pytest.raises(UserError, match="SET outside a task"):
        Layout(WSE2, 1, 1).place(after)
    with pytest.raises(UserError, match="task 'main' is declared twice"):
        Layout(WSE2, 1, 1).place(twice)


def test_a_task_for_wavelets_needs_their_queue_and_has_a_register_of_its_own() -> None:
    def no_queue(pe: ProgramBuilder) -> None:
        with pe.task("each", on=pe.send(3)):
            pass

    def count(pe: ProgramBuilder) -> None:
        seen = pe.register()
        with pe.task("each", on=pe.receive(0)):
            pe.scalar(Op.IADD, seen, seen, 1)

    def send(pe: ProgramBuilder) -> None:
        x = pe.array("x", 5)
        with pe.task("main", start=True):
            pe.mov(pe.send(0), x)

    with pytest.raises(UserError, match=r"colour 3 is read without pe\.receive\(3\)"):
        Layout(WSE2, 1, 1).place(no_queue)
    layout = Layout(WSE2, 2, 1)
    layout.route(0, Rect(0, 0), RAMP, EAST)
    layout.route(0, Rect(1, 0), WEST, RAMP)
    layout.place(send, Rect(0, 0))
    layout.place(count, Rect(1, 0))
    simulation = Simulation(layout, engine="reference")
    simulation.write("x", np.full(5, 7.0))
    simulation.run()
    assert simulation.image.registers[1, 0] == 5


def test_integers_of_numpy_are_integers() -> None:
    def program(pe: ProgramBuilder) -> None:
        x, y = pe.array("x", np.int64(6)), pe.array("y", 6, "i16")
        registers = [pe.register() for _ in range(3)]
        with pe.task("main", start=True):
            pe.set(registers[0], np.int64(5))
            pe.scalar(Op.IADD, registers[1], registers[0], np.int32(3))
            with pe.loop(np.int64(4)):
                pe.scalar(Op.IADD, registers[2], registers[2], 1)
            pe.add(x, x, x)
            pe.add(x, x, x, length=np.int64(2))
            pe.vector(Op.CONVERT, y, x, dtype="f32")

    layout = Layout(WSE2, 1, 1)
    layout.place(program)
    simulation = Simulation(layout, engine="reference")
    simulation.write("x", np.arange(1, 7))
    simulation.run()
    assert simulation.image.registers[0, :3].tolist() == [5, 8, 4]
    assert simulation.read("x")[0].tolist() == simulation.read("y")[0].tolist() == [4, 8, 6, 8, 10, 12]


def test_host_copies_and_params_must_fit_the_layout() -> None:
    def program(pe: ProgramBuilder) -> None:
        pe.array("x", 4)
        pe.param("n")

    layout = Layout(WSE2, 3, 2)
    layout.place(program)
    with pytest.raises(UserError, match=r"param 'n' of \(2, 3\) PEs .* got \(2,\)"):
        layout.param("n", np.arange(2))
    with pytest.raises(UserError, match="32 bits with sign, got 2147483648"):
        layout.param("n", 2**31)
    with pytest.raises(UserError, match="sizes must not be negative"):
        layout.place(program, Rect(0, 0, -1, 2))
    with pytest.raises(UserError, match=r"must be bool \(2, 3\), got int64 \(2, 3\)"):
        layout.place(program, np.ones((2, 3), np.int64))
    simulation = Simulation(layout, engine="reference")
    with pytest.raises(UserError, match="reaches outside the layout of 3 x 2 PEs"):
        simulation.write("x", np.zeros(4), Rect(2, 0, 2, 1))
    with pytest.raises(UserError, match=r"takes \(6, 4\) values, got \(5,\)"):
        simulation.write("x", np.zeros(5))


def test_too_many_programs_say_how_pes_share_one() -> None:
    def program(pe: ProgramBuilder, *, sizes: object) -> None:
        pe.array("x", 4)

    layout = Layout(WSE2, 200, 1)
    layout.program_of = layout.program_of.astype(np.int8)  # as if there were room for fewer
    for x in range(128):
        layout.place(program, Rect(x, 0), sizes=[4])
    with pytest.raises(UserError, match=r"more than 128 programs: .*tuples, not lists"):
        layout.place(program, Rect(128, 0), sizes=[4])


def test_numbers_of_numpy_are_numbers() -> None:
    def program(pe: ProgramBuilder, *, kind: type) -> None:
        x, y, r = pe.array("x", 8), pe.array("y", 8), pe.register()
        with pe.task("main", start=True):
            pe.set(r, kind(3))
            pe.scalar(Op.IADD, r, r, kind(4))
            with pe.loop(kind(5)):
                pe.mov(x, y, length=kind(6))
            pe.mov(x[kind(1) : kind(3)], y[: kind(2)])

    codes = [Layout(WSE2, 1, 1).place(program, kind=kind).code for kind in (int, np.int64)]
    np.testing.assert_array_equal(*codes)


def test_layouts_say_what_they_take() -> None:
    with pytest.raises(UserError, match=r"takes a wafer, such as openwafer.systems.WSE2, got 'wse2'"):
        Layout("wse2", 1, 1)  # pyright: ignore[reportArgumentType]
    layout = Layout(WSE2, 2, 1)
    for wrong in ("EAST", 5, ["EAST"], 1.0):
        with pytest.raises(UserError, match=r"a direction is NORTH, EAST, SOUTH, WEST or RAMP, got ('EAST'|5|1.0)"):
            layout.route(0, None, RAMP, wrong)  # pyright: ignore[reportArgumentType]
