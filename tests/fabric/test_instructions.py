"""Every vector and scalar instruction, type, stride and offset: the C engine agrees with the reference bit by bit."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.fabric import ArchitectureError, Layout, Mem, Op, ProgramBuilder, Simulation
from openwafer.fabric.isa import SLOW_SCALAR_OPS, Dtype
from openwafer.systems import WSE2, WSE3, Wafer

LENGTH = 48  # elements of every array
UNARY = [Op.MOV, Op.EXP, Op.RSQRT, Op.RECIP]
BINARY = [Op.ADD, Op.SUB, Op.MUL, Op.MAX, Op.MAC]
REDUCING = [Op.SUM, Op.DOT, Op.MAXOF]
TYPES = [kind.name for kind in Dtype]
SCALAR = [Op.FADD, Op.FMUL, Op.FMAX, Op.FEXP, Op.FRSQRT, Op.FRECIP, Op.IADD, Op.IMUL, Op.ILT, Op.IEQ]


@st.composite
def slices(draw: st.DrawFn, length: int) -> tuple[str, slice, bool]:
    """Array, `length` elements of it, and whether a register moves them by eight bytes."""
    moved = draw(st.integers(0, 3)) == 0
    step = draw(st.sampled_from([1, 1, 1, 2, 3]))
    span = (length - 1) * step + 1
    start = draw(st.integers(0, LENGTH - span - 4 * moved))
    forward = slice(start, start + span, step)
    backward = slice(start + span - 1, start - 1 if start else None, -step)
    return draw(st.sampled_from("xyz")), backward if draw(st.integers(0, 4)) == 0 else forward, moved


@st.composite
def instructions(draw: st.DrawFn) -> tuple:
    kind = draw(st.sampled_from(["vector", "vector", "vector", "convert", "reduce", "scalar", "register", "last"]))
    length = draw(st.integers(1, 14))
    if kind == "scalar":
        return kind, draw(st.sampled_from(SCALAR)), *(draw(st.integers(0, 3)) for _ in range(3))
    dtype = draw(st.sampled_from(TYPES))
    op = draw(st.sampled_from(REDUCING if kind == "reduce" else UNARY + BINARY))
    if dtype.startswith("i") and op in (Op.EXP, Op.RSQRT, Op.RECIP):
        op = Op.MOV
    operands = tuple(draw(slices(length)) for _ in range(3))
    return kind, op, dtype, draw(st.sampled_from(TYPES)), operands, draw(st.integers(0, 3)), draw(st.booleans())


def program(pe: ProgramBuilder, *, todo: list[tuple]) -> None:
    arrays = {(name, kind.name): pe.array(f"{name}_{kind.name}", LENGTH, kind.name) for kind in Dtype for name in "xyz"}
    registers = [pe.register() for _ in range(4)]
    eight = pe.register()

    def operand(choice: tuple[str, slice, bool], dtype: str) -> Mem:
        name, part, moved = choice
        view = arrays[name, dtype][part]
        return view.at(eight) if moved else view

    with pe.task("main", start=True):
        pe.set(eight, 8)
        for index, value in enumerate((1.5, -2.0, 3, 0.25)):
            pe.set(registers[index], value)
        for kind, op, *rest in todo:
            if kind == "scalar":
                dst, a, b = (registers[i] for i in rest)
                pe.scalar(op, dst, a, None if op in SLOW_SCALAR_OPS else b)
                continue
            dtype, other, operands, index, keeps = rest
            dst, a, b = (operand(choice, dtype) for choice in operands)
            if kind == "convert":
                pe.convert(operand(operands[0], other), a)
            elif kind == "reduce":
                pe.vector(op, registers[index], a, b if op is Op.DOT else None)
            elif kind == "last" and op is not Op.MAC:
                pe.vector(op, registers[index], a, None if op in UNARY else b)
            elif op in UNARY:
                pe.vector(op, dst, registers[index] if kind == "register" else a, dtype=dtype, length=a.length)
            else:
                pe.vector(op, dst, a, registers[index] if kind == "register" else b)
            if keeps:
                pe.store(arrays["z", "f32"][:1], registers[index])
                pe.load(registers[index], arrays["x", "f16"][1:2])


def outcome(todo: list[tuple], chip: Wafer, engine: str) -> tuple:
    layout = Layout(chip, 1, 1)
    layout.place(program, todo=todo)
    simulation = Simulation(layout, engine=engine)  # pyright: ignore[reportArgumentType]
    rng = np.random.default_rng(3)
    for name in layout.programs[0].arrays:
        values = rng.integers(-9, 10, (1, LENGTH)) * (3000 if "x_" in name else 1) / (1 if "_i" in name else 4)
        simulation.write(name, values)
    try:
        cycles = simulation.run().cycles
    except ArchitectureError as error:
        return "error", error.fault, str(error)
    return cycles, simulation.image.memory.tobytes(), simulation.image.registers.tobytes()


@settings(max_examples=150, deadline=None)
@given(st.lists(instructions(), min_size=1, max_size=8), st.sampled_from([WSE2, WSE3]))
def test_engine_and_reference_agree(todo: list[tuple], chip: Wafer) -> None:
    assert outcome(todo, chip, "c") == outcome(todo, chip, "reference")
