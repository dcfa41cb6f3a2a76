"""Tasks started by wavelets, by completion and by each other, blocked and unblocked: engine and reference agree."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openwafer.fabric import EAST, RAMP, WEST, ArchitectureError, Layout, Op, ProgramBuilder, Rect, Simulation
from openwafer.systems import WSE2, WSE3, Wafer

WORDS = 24
TASKS = ("first", "second", "third", "fourth")
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["activate", "block", "unblock"]), st.sampled_from(TASKS)),
    st.tuples(st.just("work"), st.integers(1, 30)),
    st.tuples(st.just("wait"), st.integers(0, 2)),
    st.tuples(st.just("send"), st.integers(1, WORDS), st.integers(0, 2), st.sampled_from([None, *TASKS])),
    st.tuples(st.just("receive"), st.integers(1, WORDS), st.integers(0, 2), st.sampled_from([None, *TASKS])),
    st.tuples(st.just("sparse"), st.integers(1, WORDS), st.integers(0, 2), st.sampled_from([None, *TASKS])),
)
# What each task of a PE does, which of them runs per wavelet (if any), and how many times a task may run at all.
PES = st.tuples(
    st.tuples(*[st.lists(ACTIONS, max_size=4)] * len(TASKS)), st.sampled_from([None, None, 0, 3]), st.integers(2, 6)
)


def member(pe: ProgramBuilder, *, todo: tuple, incoming: int, outgoing: int) -> None:
    lists, data_task, limit = todo
    x, y = pe.array("x", WORDS, "f16"), pe.array("y", WORDS, "f16")
    log, runs = pe.array("log", 4, "i32"), pe.register()
    pe.receive(incoming)
    word, more, seen = pe.register(), pe.register(), pe.register()
    for index, (name, actions) in enumerate(zip(TASKS, lists, strict=True)):
        options = {"on": pe.receive(incoming), "word": word} if index == data_task else {}
        with pe.task(name, start=index == 0, **options):
            pe.scalar(Op.IADD, runs, runs, 1)
            pe.scalar(Op.IMUL, seen, seen, 3)
            pe.scalar(Op.IADD, seen, seen, index)
            pe.store(log[index : index + 1], seen)
            pe.scalar(Op.ILT, more, runs, limit)
            with pe.when(more):  # or programs could go on for ever
                for action in actions:
                    act(pe, action, (x, y), incoming, outgoing)


def act(pe: ProgramBuilder, action: tuple, arrays: tuple, incoming: int, outgoing: int) -> None:
    kind, value, *rest = action
    x, y = arrays
    if kind in ("activate", "block", "unblock"):
        getattr(pe, kind)(value)
    elif kind == "work":
        pe.mac(y[:value], x[:value], x[:value]) if value <= WORDS else pe.mov(y, x)
    elif kind == "wait":
        pe.wait(value)
    else:
        thread, then = rest
        if kind == "receive":
            pe.add(y[:value], x[:value], pe.receive(incoming), thread=thread, then=then)
        else:
            pe.mov(pe.send(outgoing), x[:value], thread=thread, then=then, skip_zeros=kind == "sparse")


def outcome(todo: list, chip: Wafer, engine: str) -> tuple:
    layout = Layout(chip, 2, 1)
    for index, side in enumerate((EAST, WEST)):
        layout.route(index, Rect(index, 0), RAMP, side)
        layout.route(1 - index, Rect(index, 0), side, RAMP)
        layout.place(member, Rect(index, 0), todo=todo[index], incoming=1 - index, outgoing=index)
    simulation = Simulation(layout, engine=engine)  # pyright: ignore[reportArgumentType]
    simulation.write("x", np.arange(2 * WORDS).reshape(2, WORDS) % 3)
    try:
        report = simulation.run(20_000)
    except ArchitectureError as error:
        return "error", error.fault, str(error)
    image = simulation.image
    return report.cycles, report.pe_utilisation, report.stalls, image.memory.tobytes(), image.registers.tobytes()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PES, min_size=2, max_size=2), st.sampled_from([WSE2, WSE3]))
def test_engine_and_reference_agree(todo: list, chip: Wafer) -> None:
    assert outcome(todo, chip, "c") == outcome(todo, chip, "reference")
