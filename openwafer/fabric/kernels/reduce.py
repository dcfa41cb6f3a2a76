"""Sums (or maxima) of vectors along a line of PEs, to index 0: chain, two-phase and tree.

A collective here is an object with `route(axis)`, which lays its routes, `emit(pe, index, vector)`, which writes the
instructions of the PE at `index` into the task being built, and `cycles(wafer, words)`, its closed formula.
B words, P PEs, S the step of the two-phase reduction.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from openwafer.config import option
from openwafer.errors import UserError
from openwafer.fabric.isa import Mem, Op
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.layout import RAMP, Layout
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer


class Collective(Protocol):
    """Something that all PEs of a line do together."""

    def route(self, axis: Axis) -> None: ...
    def emit(self, pe: ProgramBuilder, index: int, vector: Mem, op: Op = Op.ADD) -> None: ...
    def cycles(self, wafer: Wafer, words: int) -> float: ...


def step_cycles(wafer: Wafer, distance: int = 1) -> int:
    """From a word read by one PE to the word that came of it, read by a PE `distance` hops on."""
    return 2 * wafer.ramp_cycles + distance * wafer.hop_cycles + wafer.costs.forward_latency


@dataclass(frozen=True)
class Chain:
    """Every PE adds its vector to the stream that passes: B + (P-1) steps. Uses two colours in turn.

    `members` are the indices that take part, from the far end to the root; words pass through the PEs between.
    """

    members: tuple[int, ...]
    colours: tuple[int, int]

    def _colour(self, rank: int) -> int:
        """Of the stream that the member of this rank sends."""
        return self.colours[rank % 2]

    def route(self, axis: Axis) -> None:
        for rank, (sender, receiver) in enumerate(zip(self.members, self.members[1:], strict=False)):
            route_line(axis, self._colour(rank), sender, receiver)

    def emit(self, pe: ProgramBuilder, index: int, vector: Mem, op: Op = Op.ADD) -> None:
        if index not in self.members or len(self.members) == 1:
            return
        rank = self.members.index(index)
        if rank == 0:
            pe.mov(pe.send(self._colour(0)), vector)
        elif rank == len(self.members) - 1:
            pe.vector(op, vector, vector, pe.receive(self._colour(rank - 1)))
        else:
            pe.vector(op, pe.send(self._colour(rank)), vector, pe.receive(self._colour(rank - 1)))

    def cycles(self, wafer: Wafer, words: int) -> float:
        return self.finish(wafer, words, {})

    def finish(self, wafer: Wafer, words: int, ready: dict[int, float]) -> float:
        """When the root has the sum, if members are `ready` at these times (others at 0): the slowest way to it."""
        latest = ready.get(self.members[0], 0.0)  # of the first word, without the start of an instruction
        if len(self.members) == 1:
            return latest  # nothing to receive
        for before, member in zip(self.members, self.members[1:], strict=False):
            latest = max(latest + step_cycles(wafer, abs(before - member)), ready.get(member, 0.0))
        return latest + wafer.costs.fabric_startup + words


def route_line(axis: Axis, colour: int, sender: int, receiver: int) -> None:
    """Words of `colour` from the core at one index straight to the core at another."""
    onward = axis.forward if receiver > sender else axis.backward
    back = axis.backward if receiver > sender else axis.forward
    axis.route(colour, sender, RAMP, onward)
    first, last = sorted((sender, receiver))
    axis.route(colour, first + 1, back, onward, last - first - 1)
    axis.route(colour, receiver, back, RAMP)


@dataclass(frozen=True)
class TwoPhase:
    """Chains within groups of S, then a chain over the groups' roots: 2B + (S-1) steps + (P/S-1) long steps."""

    length: int
    step: int
    colours: tuple[int, int, int, int]

    def _groups(self) -> list[Chain]:
        return [
            Chain(tuple(range(min(start + self.step, self.length) - 1, start - 1, -1)), self.colours[:2])
            for start in range(0, self.length, self.step)
        ]

    def _roots(self) -> Chain:
        return Chain(tuple(reversed(range(0, self.length, self.step))), self.colours[2:])

    def route(self, axis: Axis) -> None:
        for chain in [*self._groups(), self._roots()]:
            chain.route(axis)

    def emit(self, pe: ProgramBuilder, index: int, vector: Mem, op: Op = Op.ADD) -> None:
        self._groups()[index // self.step].emit(pe, index, vector, op)
        self._roots().emit(pe, index, vector, op)

    def cycles(self, wafer: Wafer, words: int) -> float:
        """The last group may be shorter, and ready before the others."""
        return self._roots().finish(wafer, words, {g.members[-1]: g.cycles(wafer, words) for g in self._groups()})


@dataclass(frozen=True)
class Tree:
    """Pairs, pairs of pairs, ...: log2(P) rounds of B words over doubling distances; one colour per round."""

    length: int
    first_colour: int = 0

    @property
    def num_rounds(self) -> int:
        return (self.length - 1).bit_length()

    def _pairs(self, level: int) -> list[tuple[int, int]]:
        distance = 1 << level
        return [(i, i - distance) for i in range(distance, self.length, 2 * distance)]

    def route(self, axis: Axis) -> None:
        for level in range(self.num_rounds):
            for sender, receiver in self._pairs(level):
                route_line(axis, self.first_colour + level, sender, receiver)

    def emit(self, pe: ProgramBuilder, index: int, vector: Mem, op: Op = Op.ADD) -> None:
        for level in range(self.num_rounds):
            colour = self.first_colour + level
            for sender, receiver in self._pairs(level):
                if index == sender:
                    pe.mov(pe.send(colour), vector)
                if index == receiver:
                    pe.vector(op, vector, vector, pe.receive(colour))

    def cycles(self, wafer: Wafer, words: int) -> float:
        return self._finish(wafer, words, self.length)

    def _finish(self, wafer: Wafer, words: int, length: int) -> float:
        """Both halves, then the second to the first; the second is smaller if `length` is no power of two."""
        if length == 1:
            return 0.0
        first = 1 << ((length - 1).bit_length() - 1)
        arrived = self._finish(wafer, words, length - first) + step_cycles(wafer, first)
        return max(arrived, self._finish(wafer, words, first)) + wafer.costs.fabric_startup + words


@dataclass(frozen=True, kw_only=True)
class ReduceConfig:
    """`openwafer simulate reduce`: one row of PEs, fp32, result in the PE at the west end."""

    num_pes: int = option(512, help="PEs in the row", minimum=2)
    words: int = option(4096, help="fp32 words per PE", minimum=1)
    algorithm: Literal["chain", "two_phase", "tree"] = option("chain", help="how to reduce; tree: up to 256 PEs")
    step: int = option(8, help="PEs per group of the two-phase algorithm", minimum=2)

    def collective(self) -> Collective:
        if self.algorithm == "tree":
            if self.num_pes > 256:
                # One input queue per round, and a PE has eight.
                raise UserError(f"--algorithm tree takes at most 256 PEs, got {self.num_pes}: use two_phase")
            return Tree(self.num_pes)
        if self.algorithm == "two_phase":
            return TwoPhase(self.num_pes, self.step, (0, 1, 2, 3))
        return Chain(tuple(reversed(range(self.num_pes))), (0, 1))


def line_program(pe: ProgramBuilder, *, collective: Collective, index: int, words: int) -> None:
    x = pe.array("x", words)
    with pe.task("main", start=True):
        collective.emit(pe, index, x)


def run_line(
    wafer: Wafer, collective: Collective, num_pes: int, words: int, setting: Setting, *, everywhere: bool
) -> Outcome:
    """A collective over one row of random vectors; the sum must be at index 0, or `everywhere`."""
    if num_pes > wafer.usable_columns:
        raise UserError(f"--num_pes must be at most {wafer.usable_columns} on {wafer.name}, got {num_pes}")
    layout = Layout(wafer, num_pes, 1)
    axis = Axis(layout, "x")
    collective.route(axis)
    for index in range(num_pes):
        layout.place(line_program, axis.rect(index), collective=collective, index=index, words=words)
    simulation = setting.start(layout)
    values = np.random.default_rng(setting.seed).standard_normal((num_pes, words)).astype(np.float32)
    simulation.write("x", values)
    report = setting.run(simulation)
    got = simulation.read("x", None if everywhere else axis.rect(0))
    error = relative_error(got, values.sum(axis=0, dtype=np.float64)[None])
    cycles = wafer.costs.task_start + collective.cycles(wafer, words)
    return Outcome(
        report=report, simulation=simulation, formula_cycles=cycles, max_error=error, tolerance=2e-7 * num_pes
    )


def run(config: ReduceConfig, wafer: Wafer, setting: Setting) -> Outcome:
    return run_line(wafer, config.collective(), config.num_pes, config.words, setting, everywhere=False)
