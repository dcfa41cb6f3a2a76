"""Running a layout: copy in, run, copy out, and what it cost."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from openwafer.errors import UserError
from openwafer.fabric import toolchain
from openwafer.fabric.engine import EngineMachine, library
from openwafer.fabric.image import Image
from openwafer.fabric.layout import Layout, Rect
from openwafer.fabric.reference import ReferenceMachine
from openwafer.systems import SYSTEMS

EngineName = Literal["auto", "c", "reference"]
MAX_CYCLES = 2**31 - 2


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Cycles that movers waited, summed over all of them, by what they lacked at first."""

    room: int  # the next queue was full, or its switch was turned away
    link: int  # another colour used the link
    words: int  # a fabric instruction had nothing to read


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run cost."""

    cycles: int
    num_pes: int  # PEs with a program
    pe_utilisation: float  # share of PE-cycles in which the main thread worked or its fabric instruction moved a word
    link_utilisation: float  # share of link-cycles of the four mesh links in which a word moved
    stalls: Stalls
    events: int

    @property
    def pe_cycles(self) -> int:
        return self.cycles * self.num_pes


class Simulation:
    """One run of a layout. `write` before it, `run` once, `read` after it."""

    def __init__(self, layout: Layout, *, engine: EngineName = "auto", trace: bool = False) -> None:
        self.layout, self.engine = layout, _available(engine)
        self.image = Image(layout)
        self.trace = trace
        self.io_words = 0  # that the host copied in and out so far
        self.machine: EngineMachine | ReferenceMachine | None = None

    def write(self, name: str, values: np.ndarray, rect: Rect | None = None) -> None:
        """Host copy in: array `name` of every PE of `rect` that has it (in order of y, then x)."""
        if self.machine is not None:
            raise UserError(f"array {name!r} is written after the run: write before it, or make a new Simulation")
        self.io_words += self.image.write(name, values, rect)

    def read(self, name: str, rect: Rect | None = None) -> np.ndarray:
        """Host copy out: [pes, elements]."""
        values = self.image.read(name, rect)
        self.io_words += -(-values.nbytes // 4)
        return values

    @property
    def io_cycles(self) -> int:
        """What the host's copies take over the system's links; not overlapped with the run."""
        wafer = self.layout.wafer
        system = next((system for system in SYSTEMS.values() if system.wafer.name == wafer.name), None)
        if system is None:
            known = ", ".join(system.wafer.name for system in SYSTEMS.values())
            raise UserError(
                f"io_cycles: the IO links of a system around wafer {wafer.name!r} are not known, only of {known}: give "
                "a changed wafer the name of one of them, or use io_words"
            )
        per_cycle = replace(system, wafer=wafer).io_words_per_cycle  # the clock may be another
        return 0 if per_cycle is None else round(self.io_words / per_cycle)

    def run(self, max_cycles: int = MAX_CYCLES, progress: Callable[[int], None] | None = None) -> Report:
        if self.machine is not None:
            raise UserError("a simulation runs once: make a new Simulation of the layout for another run")
        if self.engine == "reference":
            self.machine = ReferenceMachine(self.image)
            return self._report(self.machine.run(max_cycles))
        self.machine = EngineMachine(self.image, trace=self.trace)
        return self._report(self.machine.run(max_cycles, progress))

    def _report(self, cycles: int) -> Report:
        machine, layout = self.machine, self.layout
        num_pes = int((self.image.program_of >= 0).sum())
        links = 2 * (layout.width * (layout.height - 1) + layout.height * (layout.width - 1))
        if isinstance(machine, EngineMachine):
            busy, link_words, events = int(machine.busy.sum()), int(machine.status[6]), int(machine.status[5])
            room, link, words = (int(value) for value in machine.status[7:10])
        else:
            assert machine is not None
            busy, link_words, events = machine.busy_cycles, machine.link_words, 0
            room, link, words = (machine.stalls[cause] for cause in ("room", "link", "words"))
        return Report(
            cycles=cycles,
            num_pes=num_pes,
            pe_utilisation=busy / max(1, cycles * num_pes),
            link_utilisation=link_words / max(1, cycles * links),
            stalls=Stalls(room=room, link=link, words=words),
            events=events,
        )


def _available(engine: EngineName) -> EngineName:
    """`auto` is the C engine, or the reference with a warning where it cannot be built."""
    if engine not in get_args(EngineName):
        raise UserError(f"engine must be one of {', '.join(get_args(EngineName))}, got {engine!r}")
    if engine == "reference":
        return engine
    try:
        library()
    except toolchain.NoCompiler as error:
        if engine == "c":
            raise UserError(str(error)) from None
        warnings.warn(f"{error}; running the slow reference instead", stacklevel=3)
        return "reference"
    return "c"
