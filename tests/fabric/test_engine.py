"""The C engine and the reference machine agree: cycle, values, errors, over random small programs."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openwafer.fabric import (
    EAST,
    NORTH,
    RAMP,
    SOUTH,
    WEST,
    ArchitectureError,
    Fault,
    Layout,
    Op,
    ProgramBuilder,
    Rect,
    Simulation,
)
from openwafer.fabric.layout import opposite
from openwafer.systems import WSE2, WSE3

STEP = {NORTH: (0, -1), EAST: (1, 0), SOUTH: (0, 1), WEST: (-1, 0)}
ARRAY = 40  # elements of every array of a random program


@st.composite
def paths(draw: st.DrawFn, width: int, height: int) -> list[tuple[int, int, int | None]]:
    """(x, y, direction out) along a path that does not cross itself; the last direction is None."""
    x, y = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    path, seen = [], {(x, y)}
    for _ in range(draw(st.integers(0, 5))):
        around = [(d, x + dx, y + dy) for d, (dx, dy) in STEP.items()]
        free = [(d, a, b) for d, a, b in around if 0 <= a < width and 0 <= b < height and (a, b) not in seen]
        if not free:
            break
        direction, a, b = draw(st.sampled_from(free))
        path.append((x, y, direction))
        x, y = a, b
        seen.add((x, y))
    return [*path, (x, y, None)]


@st.composite
def scenarios(draw: st.DrawFn) -> dict:
    """Colours with their paths, and for each PE a list of actions."""
    width, height = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    actions: dict[tuple[int, int], list[tuple]] = {(x, y): [] for x in range(width) for y in range(height)}
    colours = []
    for colour in range(draw(st.integers(1, 4))):
        path = draw(paths(width, height))
        if len(path) < 2:
            continue
        drops = {i for i in range(1, len(path) - 1) if draw(st.booleans())} | {len(path) - 1}
        switches = draw(st.lists(st.integers(0, len(path) - 1), max_size=2)) if draw(st.integers(0, 2)) == 0 else []
        dtype = draw(st.sampled_from(["f32", "f16", "i32", "bf16"]))
        sizes = draw(st.lists(st.integers(1, ARRAY), min_size=1, max_size=3))
        second = draw(st.integers(0, len(path) - 1)) if draw(st.integers(0, 5)) == 0 else None
        sources = [0] + ([second] if second else [])
        for source in sources:
            for size in sizes:
                send = draw(st.sampled_from(["mov", "mov", "back", "add", "reg"]))
                actions[path[source][:2]].append((send, colour, size, dtype, draw(st.sampled_from([0, 0, 0, 1]))))
                if switches and draw(st.booleans()):
                    actions[path[draw(st.sampled_from(switches))][:2]].append(("advance", colour, 1, dtype, 0))
                if switches and draw(st.booleans()):
                    actions[path[source][:2]].append(("control", colour, 1, dtype, 0))
        for drop in drops:
            style = draw(st.sampled_from(["same", "same", "merge", "task", "forward", "reduce"]))
            total = sizes if style != "merge" else [sum(sizes)]
            if sum(total) > ARRAY and style == "merge":
                total = sizes
            for size in total:
                actions[path[drop][:2]].append(
                    (f"recv_{style}", colour, size, dtype, draw(st.sampled_from([0, 0, 0, 1])))
                )
        colours.append({"colour": colour, "path": path, "drops": drops, "switches": switches, "sources": sources})
    for pe, todo in actions.items():
        for _ in range(draw(st.integers(0, 2))):
            todo.append(
                (
                    draw(st.sampled_from(["local", "spoil", "loop", "tile", "wait"])),
                    0,
                    draw(st.integers(1, ARRAY)),
                    "f32",
                    0,
                )
            )
        actions[pe] = draw(st.permutations(todo)) if draw(st.booleans()) else todo
    chip = draw(st.sampled_from([WSE2, WSE3]))
    return {"width": width, "height": height, "colours": colours, "actions": actions, "chip": chip}


def build(scenario: dict) -> Layout:
    layout = Layout(scenario["chip"], scenario["width"], scenario["height"])
    for item in scenario["colours"]:
        before = None
        for index, (x, y, out) in enumerate(item["path"]):
            inputs = set() if before is None else {opposite(before)}
            inputs |= {RAMP} if index in item["sources"] else set()
            outputs = ({out} if out is not None else set()) | ({RAMP} if index in item["drops"] else set())
            other = {RAMP} if index in item["drops"] else outputs
            positions = [(inputs, outputs), (inputs, other)] if index in item["switches"] else [(inputs, outputs)]
            layout.switch(item["colour"], Rect(x, y), positions, ring=item["colour"] % 2 == 0)
            before = out
    for (x, y), todo in scenario["actions"].items():
        if todo:
            layout.place(program, Rect(x, y), actions=todo)
    return layout


def program(pe: ProgramBuilder, actions: list[tuple]) -> None:
    arrays = {name: pe.array(name, ARRAY, name.split("_")[1]) for name in
              ("x_f32", "y_f32", "x_f16", "y_f16", "x_i32", "y_i32", "x_bf16", "y_bf16", "c_f32")}  # fmt: skip
    word, count, value = pe.register(), pe.register(), pe.param("value")
    with pe.task("main", start=True):
        for number, (kind, colour, size, dtype, thread) in enumerate(actions):
            x, y = arrays[f"x_{dtype}"][:size], arrays[f"y_{dtype}"][:size]
            options = {"thread": number % 8} if thread else {}
            if kind == "mov":
                pe.mov(pe.send(colour), x, **options)
            elif kind == "back":  # what is received and computed there meanwhile must not change what was sent
                pe.mov(pe.send(colour), y, **options)
            elif kind == "add":
                pe.add(pe.send(colour), x, y, **options)
            elif kind == "reg":
                pe.mov(pe.send(colour), value, length=size, dtype="i32" if dtype == "i32" else dtype, **options)
            elif kind == "control":
                pe.control(pe.send(colour))
            elif kind == "recv_task":
                pe.receive(colour)
            elif kind == "recv_reduce" and dtype != "i32":
                pe.vector(Op.SUM, word, pe.receive(colour), length=size, dtype=dtype, **options)
            elif kind == "recv_forward" and size % 2:
                pe.mac(y, pe.receive(colour), x, **options)
            elif kind.startswith("recv"):
                pe.add(y, x, pe.receive(colour), **options)
            elif kind == "advance":
                pe.advance(colour)
            elif kind == "wait":
                pe.wait(size % 8)
            elif kind == "local":
                pe.mac(arrays["c_f32"][:size], arrays["x_f32"][:size], arrays["y_f32"][:size])
            elif kind == "spoil":
                pe.mov(arrays["x_f32"][:size], arrays["c_f32"][:size])
                pe.mul(arrays["x_f16"][:size], arrays["x_f16"][:size], arrays["x_f16"][:size])
            elif kind == "tile":
                pe.tile(arrays["c_f32"], arrays["x_f32"], arrays["y_f32"], m=3, n=2, k=4)
            else:
                with pe.loop(size % 5, overhead=size % 3) as step:
                    pe.scalar(Op.IADD, count, count, 1)
                    pe.scalar(Op.ILT, word, step, 2)
                    with pe.when(word):
                        pe.store(arrays["c_f32"][:1], value)
    for colour in {a[1] for a in actions if a[0] == "recv_task"}:
        with pe.task(f"data{colour}", on=pe.receive(colour), word=word):
            pe.scalar(Op.IADD, count, count, word)
            pe.store(arrays["y_i32"][3:4], count)


def outcome(scenario: dict, engine: str) -> tuple:
    simulation = Simulation(build(scenario), engine=engine)  # pyright: ignore[reportArgumentType]
    memory = simulation.image.memory
    rng = np.random.default_rng(0)
    names = {name for p in simulation.layout.programs for name in p.arrays}
    for name in sorted(names):
        simulation.write(name, rng.integers(-4, 5, simulation.read(name).shape))
    simulation.image.registers[:, 2] = (
        rng.integers(-3, 4, len(simulation.image.registers)).astype(np.float32).view(np.int32)
    )
    try:
        report = simulation.run(20_000)
    except ArchitectureError as error:
        # Of several errors in one cycle either may be named.
        return "error", error.fault, error.cycle, str(error) if error.fault is Fault.DEADLOCK else ""
    return (
        report.cycles,
        report.pe_utilisation,
        report.link_utilisation,
        report.stalls,
        memory.tobytes(),
        simulation.image.registers.tobytes(),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(scenarios())
def test_engine_and_reference_agree(scenario: dict) -> None:
    if not any(scenario["actions"].values()):
        return
    assert outcome(scenario, "c") == outcome(scenario, "reference")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(scenarios().filter(lambda scenario: scenario["height"] >= 4 and any(scenario["actions"].values())))
def test_two_threads_agree_with_one(scenario: dict) -> None:
    """The mesh is split into two bands of rows."""
    results = []
    for num_threads in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("openwafer.fabric.engine._suitable_threads", lambda _, number=num_threads: number)
            results.append(outcome(scenario, "c"))
    assert results[0] == results[1]


@st.composite
def relays(draw: st.DrawFn) -> list:
    """Rows of PEs that compute on a stream as it passes; each PE may write over its operand at any time."""
    length = draw(st.integers(3, 7))
    sizes = draw(st.lists(st.integers(1, ARRAY), min_size=1, max_size=2))
    row = []
    for _ in range(length):
        kind = draw(st.sampled_from(["add", "add", "mov", "swapped"]))
        row.append((kind, draw(st.sampled_from([None, 0])), draw(st.integers(0, 60)), draw(st.booleans())))
    return [sizes, row, draw(st.sampled_from(["f32", "f16", "i16"])), draw(st.booleans())]


def relay(pe: ProgramBuilder, index: int, last: bool, todo: list) -> None:
    sizes, row, dtype, both = todo
    kind, thread, delay, spoils = row[index]
    x, y = pe.array("x", ARRAY, dtype), pe.array("y", ARRAY, dtype)
    kept = pe.array("kept", 2 * ARRAY, dtype)
    out = None if last else pe.send(index % 2)
    source = None if index == 0 else pe.receive(1 - index % 2)
    with pe.task("main", start=True):
        for number, size in enumerate(sizes):
            options = {} if thread is None else {"thread": thread + number}
            if out is not None and source is not None and kind == "mov":
                pe.mov(out, source, length=size, dtype=dtype, **options)
            elif source is None and out is not None:
                pe.mov(out, x[:size], **options)
            elif out is None and source is not None:
                pe.mov(kept[number * ARRAY : number * ARRAY + size], source, **options)
            elif out is not None and source is not None:
                pe.add(out, *((source, x[:size]) if kind == "swapped" else (x[:size], source)), **options)
            if thread is not None and (number + 1 < len(sizes) or both):
                pe.wait(thread + number)
            with pe.loop(delay, overhead=1):
                pass
            if spoils:
                pe.mov(x[: size // 2 + 1], y[: size // 2 + 1])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(relays())
def test_streams_computed_on_the_way_agree(todo: list) -> None:
    results = []
    for engine in ("c", "reference"):
        width = len(todo[1])
        layout = Layout(WSE2, width, 1)
        for index in range(width):
            layout.place(relay, Rect(index, 0), index=index, last=index == width - 1, todo=todo)
            if index < width - 1:
                layout.route(index % 2, Rect(index, 0), RAMP, EAST)
            if index > 0:
                layout.route(1 - index % 2, Rect(index, 0), WEST, RAMP)
        simulation = Simulation(layout, engine=engine)
        for name in ("x", "y"):
            simulation.write(name, np.random.default_rng(ord(name)).integers(-9, 9, (width, ARRAY)))
        results.append((simulation.run(20_000).cycles, simulation.image.memory.tobytes()))
    assert results[0] == results[1]


def products(pe: ProgramBuilder, m: int, n: int, k: int, dtype: str) -> None:
    a, b, c = (pe.array(name, size, dtype) for name, size in (("a", m * k), ("b", k * n), ("c", m * n)))
    with pe.task("main", start=True):
        pe.tile(c, a, b, m=m, n=n, k=k)
        pe.mac(c[:m], a[:m], a[m : 2 * m])


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "i16"])
@pytest.mark.parametrize(("m", "n", "k"), [(6, 6, 6), (9, 2, 70), (70, 3, 5), (67, 2, 66), (120, 1, 8)])
def test_products_of_all_shapes_agree(m: int, n: int, k: int, dtype: str) -> None:
    """Shapes on both sides of what the engine holds as floats at once, and of the write buffer."""
    results = []
    for engine in ("c", "reference"):
        layout = Layout(WSE3, 1, 1)
        layout.place(products, m=m, n=n, k=k, dtype=dtype)
        simulation = Simulation(layout, engine=engine)
        for name in "abc":
            shape = simulation.read(name).shape
            simulation.write(
                name, np.random.default_rng(ord(name)).standard_normal(shape) * (9 if dtype == "i16" else 1)
            )
        results.append((simulation.run().cycles, simulation.image.memory.tobytes()))
    assert results[0] == results[1]
