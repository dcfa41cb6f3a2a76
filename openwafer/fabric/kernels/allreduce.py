"""Sums that end up in every PE of a line: a chain and a broadcast, or a tree of two levels and a broadcast."""

from dataclasses import dataclass
from typing import Literal

from openwafer.config import option
from openwafer.fabric.isa import Mem, Op
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.outcome import Outcome, Setting
from openwafer.fabric.kernels.reduce import Chain, Collective, run_line
from openwafer.fabric.layout import RAMP
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer


@dataclass(frozen=True)
class Spread:
    """The vector of the PE at `root` to all others of the line, by multicast, one colour for each direction.

    The line is `length` PEs of the axis from `start` on; `root` and the index of a PE count from there.
    """

    length: int
    root: int
    colours: tuple[int, int]  # towards index 0, towards the end
    start: int = 0

    def route(self, axis: Axis) -> None:
        down, up, root, last = axis.backward, axis.forward, self.start + self.root, self.start + self.length - 1
        if self.root > 0:
            axis.route(self.colours[0], root, RAMP, down)
            axis.route(self.colours[0], self.start + 1, up, (down, RAMP), self.root - 1)
            axis.route(self.colours[0], self.start, up, RAMP)
        if root < last:
            axis.route(self.colours[1], root, RAMP, up)
            axis.route(self.colours[1], root + 1, down, (up, RAMP), last - root - 1)
            axis.route(self.colours[1], last, down, RAMP)

    def emit(self, pe: ProgramBuilder, index: int, vector: Mem, op: Op = Op.ADD) -> None:
        if index == self.root:
            if self.root > 0:
                pe.mov(pe.send(self.colours[0]), vector)
            if self.root < self.length - 1:
                pe.mov(pe.send(self.colours[1]), vector)
        else:
            pe.mov(vector, pe.receive(self.colours[0 if index < self.root else 1]))

    def cycles(self, wafer: Wafer, words: int) -> float:
        costs, below, above = wafer.costs, self.root, self.length - 1 - self.root
        ways = [distance for distance in (below, above) if distance]
        base = 2 * wafer.ramp_cycles + costs.forward_latency + words
        # The second direction starts when the first send is done.
        starts = [costs.fabric_startup * (i + 1) + words * i for i in range(len(ways))]
        return max((s + base + d * wafer.hop_cycles for s, d in zip(starts, ways, strict=True)), default=0)


@dataclass(frozen=True)
class Pipelined:
    """A chain to index 0, then a broadcast. Indices count from `start`."""

    length: int
    colours: tuple[int, int, int]
    start: int = 0

    def _parts(self) -> tuple[Chain, Spread]:
        chain = Chain(tuple(reversed(range(self.start, self.start + self.length))), self.colours[:2])
        return chain, Spread(self.length, 0, (self.colours[2], self.colours[2]), self.start)

    def route(self, axis: Axis) -> None:
        for part in self._parts():
            part.route(axis)

    def emit(self, pe: ProgramBuilder, index: int, vector: Mem, op: Op = Op.ADD) -> None:
        chain, spread = self._parts()
        chain.emit(pe, self.start + index, vector, op)
        spread.emit(pe, index, vector, op)

    def cycles(self, wafer: Wafer, words: int) -> float:
        return sum(part.cycles(wafer, words) for part in self._parts())


@dataclass(frozen=True)
class Blocks:
    """A sum of its own in each of the line's blocks of equal length."""

    length: int
    block: int
    colours: tuple[int, int, int]

    def _sum(self, start: int) -> Pipelined:
        return Pipelined(self.block, self.colours, start)

    def route(self, axis: Axis) -> None:
        for start in range(0, self.length, self.block):
            self._sum(start).route(axis)

    def emit(self, pe: ProgramBuilder, index: int, vector: Mem, op: Op = Op.ADD) -> None:
        start = index // self.block * self.block
        self._sum(start).emit(pe, index - start, vector, op)

    def cycles(self, wafer: Wafer, words: int) -> float:
        return self._sum(0).cycles(wafer, words)


@dataclass(frozen=True)
class TwoLevel:
    """Groups reduce from both ends to their middle, the middles to the middle of those, then a broadcast.

    Ten colours: two each for chains towards the end and towards index 0, on both levels, and two to spread.
    """

    length: int
    group: int
    colours: tuple[int, ...] = tuple(range(10))

    def _group(self, index: int) -> tuple[int, int, int]:
        """First index, root and past-the-last index of the group of `index`."""
        start = index // self.group * self.group
        stop = min(start + self.group, self.length)
        return start, (start + stop) // 2, stop

    def _levels(self) -> list[list[Chain]]:
        starts = range(0, self.length, self.group)
        first = [c for s in starts for c in self._halves(*self._members(s), self.colours[:4])]
        roots = [self._group(s)[1] for s in starts]
        return [first, self._halves(roots, len(roots) // 2, self.colours[4:8])]

    def _members(self, start: int) -> tuple[list[int], int]:
        first, root, stop = self._group(start)
        return list(range(first, stop)), root - first

    @staticmethod
    def _halves(members: list[int], root: int, colours: tuple[int, ...]) -> list[Chain]:
        """Chains to members[root] from the end and from the start; the root takes them in this order."""
        from_end = Chain(tuple(reversed(members[root:])), (colours[0], colours[1]))
        from_start = Chain(tuple(members[: root + 1]), (colours[2], colours[3]))
        return [from_end, from_start]

    def _root(self) -> int:
        roots = [self._group(s)[1] for s in range(0, self.length, self.group)]
        return roots[len(roots) // 2]

    def _spread(self) -> Spread:
        return Spread(self.length, self._root(), (self.colours[8], self.colours[9]))

    def route(self, axis: Axis) -> None:
        for level in self._levels():
            for chain in level:
                chain.route(axis)
        self._spread().route(axis)

    def emit(self, pe: ProgramBuilder, index: int, vector: Mem, op: Op = Op.ADD) -> None:
        for level in self._levels():
            for chain in level:
                chain.emit(pe, index, vector, op)
        self._spread().emit(pe, index, vector, op)

    def cycles(self, wafer: Wafer, words: int) -> float:
        """Per level: a root takes the chain from the end, then the other one, which waits by then or is to come."""
        ready: dict[int, float] = {}
        for level in self._levels():
            for chain in level:
                ready[chain.members[-1]] = chain.finish(wafer, words, ready)
        return ready[self._root()] + self._spread().cycles(wafer, words)


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig:
    """`openwafer simulate allreduce`: one row of PEs, fp32, result in every PE."""

    num_pes: int = option(256, help="PEs in the row", minimum=2)
    words: int = option(1024, help="fp32 words per PE", minimum=1)
    algorithm: Literal["pipelined", "two_level"] = option("two_level", help="how to reduce")
    group: int = option(15, help="PEs per group of the two-level tree", minimum=2)

    def collective(self) -> Collective:
        if self.algorithm == "pipelined":
            return Pipelined(self.num_pes, (0, 1, 2))
        return TwoLevel(self.num_pes, self.group)


def run(config: AllReduceConfig, wafer: Wafer, setting: Setting) -> Outcome:
    return run_line(wafer, config.collective(), config.num_pes, config.words, setting, everywhere=True)
