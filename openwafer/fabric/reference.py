"""The slow obvious machine: every router and every core, cycle by cycle, word by word. This is the definition.

In cycle t every decision looks only at the state at the start of t:
- A queue ("node") is a router's queue of one colour, a core's output queue, or a core's input queue.
- The first word of a node may move if it has arrived and every next node has room. It moves to all outputs of its
  route at once, arrives a hop later (a ramp later at a core), and takes up room from the next cycle on.
- A link carries one word per cycle. A colour that used its links in the cycle before and can move over the same
  links keeps them; the others follow in the order in which they began to wait, then by colour.
- A queue or a fabric instruction that could move a word but for a link, for room (or a switch that does not take the
  word from this side) or for words is stalled until it moves, and the stall counts for what was lacking at first.
- After a control wavelet has moved, the colour's switch in that router is in its next position.
- Then the cores act: completions, then the main thread.
"""

from collections import deque
from dataclasses import dataclass, field

from openwafer.fabric.core import MAIN, Core, Operation, Queues, Trap
from openwafer.fabric.fault import ArchitectureError, Fault, Stuck, locate
from openwafer.fabric.image import Image
from openwafer.fabric.layout import EAST, NORTH, RAMP, SOUTH, WEST, Route, opposite

RAMP_IN = 5  # the link from the core into the router, shared by all output queues


@dataclass
class Word:
    value: int
    arrives: int
    control: bool = False


@dataclass
class Node:
    """One queue. `kind` is "router", "output" (core to router) or "input" (router to core)."""

    kind: str
    pe: int
    colour: int
    capacity: int
    route: Route | None = None
    position: int = 0
    words: deque[Word] = field(default_factory=deque)
    last_fired: int | None = None
    last_links: int = 0
    waits_since: int | None = None
    waits_for: str = ""
    num_fired: int = 0

    def room(self) -> bool:
        return len(self.words) < self.capacity

    def accepts(self, direction: int) -> bool:
        return self.route is None or bool(self.route.inputs[self.position] >> direction & 1)

    def advance(self) -> None:
        if self.route is not None:
            last = len(self.route.inputs) - 1
            self.position = self.position + 1 if self.position < last else 0 if self.route.ring else last

    def ready(self, t: int) -> bool:
        return bool(self.words) and self.words[0].arrives <= t


class ReferenceMachine(Queues):
    """Runs an image in Python."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.layout = image.layout
        self.wafer = image.layout.wafer
        self.cores = {pe: Core(image, pe) for pe in range(image.program_of.size) if image.program_of[pe] >= 0}
        self.routers: dict[tuple[int, int], Node] = {}
        self.outputs: dict[tuple[int, int], Node] = {}
        self.inputs: dict[tuple[int, int], Node] = {}
        self._make_nodes()
        self.last_event = 0
        self.link_words = 0  # over the four mesh links
        self.stalls = {"room": 0, "link": 0, "words": 0}  # cycles, by what was lacking at first

    def _make_nodes(self) -> None:
        # The pipeline registers before a queue hold words besides those in the queue itself.
        ramp, layout = self.wafer.ramp_cycles, self.layout
        for colour, route_of in layout.route_of.items():
            for pe, index in enumerate(route_of.ravel()):
                if index >= 0:
                    words = self.wafer.router_queue_words
                    self.routers[pe, colour] = Node("router", pe, colour, words, layout.routes[index])
        for pe, core in self.cores.items():
            for colour, words in core.program.outputs.items():
                self.outputs[pe, colour] = Node("output", pe, colour, words + self.wafer.costs.forward_latency - 1)
            for colour, words in core.program.inputs.items():
                self.inputs[pe, colour] = Node("input", pe, colour, words + ramp)

    # -- the cycle ---------------------------------------------------------------------------------------

    def run(self, max_cycles: int) -> int:
        """Run to the end; returns the cycle of the last event in any core."""
        t = 0
        while True:
            try:
                active = self._cycle(t)
            except _Located as trouble:
                raise self._error(trouble.fault, trouble.pe, t, trouble.detail) from None
            if not active:
                upcoming = self._next_time(t)
                if upcoming is None:
                    break
                t = upcoming
            else:
                t += 1
            if t > max_cycles:
                raise self._error(Fault.CYCLE_LIMIT, 0, max_cycles, 0)
        self._check_end()
        return max((core.last_event for core in self.cores.values()), default=0)

    def _cycle(self, t: int) -> bool:
        moves = self._decide_nodes(t)
        operations = [
            (core, operation)
            for core in self.cores.values()
            for operation in core.threads.values()
            if t >= operation.start and operation.remaining and self._can_move(core, operation, t)
        ]
        self._commit(moves, operations, t)
        active = bool(moves or operations)
        if active:
            self.last_event = t
        for pe, core in self.cores.items():
            try:
                if core.step(t, self):
                    active, self.last_event = True, t
            except Trap as trap:
                raise _Located(trap.fault, pe, trap.detail) from None
        return active

    def _decide_nodes(self, t: int) -> list[tuple[Node, int, list[Node]]]:
        """Which router and output queues move a word in cycle t, over which links and to where."""
        wishes: dict[int, list[tuple[Node, int, list[Node]]]] = {}
        for node in [*self.routers.values(), *self.outputs.values()]:
            if node.ready(t):
                links, targets = self._outputs(node)
                wishes.setdefault(node.pe, []).append((node, links, targets))
        moves = []
        for wanted in wishes.values():
            taken = 0
            keep = [w for w in wanted if w[0].last_fired == t - 1 and w[0].last_links == w[1]]
            rest = [w for w in wanted if not (w[0].last_fired == t - 1 and w[0].last_links == w[1])]
            rest.sort(key=lambda w: (t if w[0].waits_since is None else w[0].waits_since, w[0].colour))
            for node, links, targets in keep + rest:
                if links & taken == 0 and self._free(node, links, targets):
                    taken |= links
                    moves.append((node, links, targets))
                elif node.waits_since is None:
                    node.waits_since, node.waits_for = t, "link" if links & taken else "room"
        return moves

    def _outputs(self, node: Node) -> tuple[int, list[Node]]:
        """Links (bit mask) and next nodes of the first word."""
        if node.kind == "output":
            return 1 << RAMP_IN, [self.routers[node.pe, node.colour]]
        assert node.route is not None
        links = node.route.outputs[node.position]
        if node.words[0].control:
            links &= ~(1 << RAMP)  # control wavelets are for routers: cores never see them
        targets = []
        step = {NORTH: -self.layout.width, SOUTH: self.layout.width, EAST: 1, WEST: -1}
        for direction in (NORTH, EAST, SOUTH, WEST):
            if links >> direction & 1:
                targets.append(self.routers[node.pe + step[direction], node.colour])
        if links >> RAMP & 1:
            targets.append(self.inputs[node.pe, node.colour])
        return links, targets

    def _free(self, node: Node, links: int, targets: list[Node]) -> bool:
        """Whether every next node has room and takes words from this side now."""
        if node.kind == "output":
            return targets[0].room() and targets[0].accepts(RAMP)
        sides = [opposite(d) for d in (NORTH, EAST, SOUTH, WEST) if links >> d & 1] + [RAMP] * (links >> RAMP & 1)
        return all(target.room() and target.accepts(side) for target, side in zip(targets, sides, strict=True))

    def _can_move(self, core: Core, operation: Operation, t: int) -> bool:
        lacks = None
        if operation.source is not None and not self.inputs[core.pe, operation.source].ready(t):
            lacks = "words"
        elif operation.target is not None and not self.outputs[core.pe, operation.target].room():
            lacks = "room"
        if lacks is not None and operation.waits_since is None:
            operation.waits_since, operation.waits_for = t, lacks
        return lacks is None

    def _commit(
        self, moves: list[tuple[Node, int, list[Node]]], operations: list[tuple[Core, Operation]], t: int
    ) -> None:
        arrived: set[int] = set()
        ramp = self.wafer.ramp_cycles
        for core, operation in operations:
            self._move_operation(core, operation, t)
        for node, links, targets in moves:
            word = node.words.popleft()
            self._end_stall(node, t)
            node.last_fired, node.last_links = t, links
            node.num_fired += 1
            self.link_words += (links & 15).bit_count()
            for target in targets:
                if id(target) in arrived:
                    raise _Located(Fault.COLLISION, target.pe, target.colour)
                arrived.add(id(target))
                latency = ramp if target.kind == "input" or node.kind == "output" else self.wafer.hop_cycles
                target.words.append(Word(word.value, t + latency, word.control))
            if word.control:
                node.advance()

    def _end_stall(self, mover: Node | Operation, t: int) -> None:
        if mover.waits_since is not None:
            self.stalls[mover.waits_for] += t - mover.waits_since
            mover.waits_since = None

    def _move_operation(self, core: Core, operation: Operation, t: int) -> None:
        self._end_stall(operation, t)
        operation.remaining -= 1
        if operation.thread == MAIN:
            core.busy_cycles += 1
        if operation.remaining == 0:
            operation.done_at = t + 1
        if operation.source is None:
            word = operation.words[operation.taken]
            operation.taken += 1
        else:
            word = self.inputs[core.pe, operation.source].words.popleft().value
            if operation.target is None:
                operation.words.append(word)
            else:
                word = core.forward(operation, word)
        if operation.target is not None:
            self.outputs[core.pe, operation.target].words.append(
                Word(word, t + self.wafer.costs.forward_latency, operation.control)
            )

    # -- what a core sees of its queues ------------------------------------------------------------------

    def head(self, pe: int, colour: int, t: int) -> bool:
        return self.inputs[pe, colour].ready(t)

    def pop(self, pe: int, colour: int) -> int:
        return self.inputs[pe, colour].words.popleft().value

    def advance(self, pe: int, colour: int) -> None:
        self.routers[pe, colour].advance()

    # -- the end -----------------------------------------------------------------------------------------

    def _next_time(self, t: int) -> int | None:
        """The next cycle in which something may happen, now that nothing did in cycle t."""
        times = [core.ready_at for core in self.cores.values() if core.ready_at is not None]
        for core in self.cores.values():
            for operation in core.threads.values():
                times += [operation.start] if operation.start > t else []
                times += [operation.done_at] if operation.done_at is not None else []
        for nodes in (self.routers, self.outputs, self.inputs):
            times += [node.words[0].arrives for node in nodes.values() if node.words]
        return min((time for time in times if time > t), default=None)

    def _check_end(self) -> None:
        stuck = [pe for pe, core in self.cores.items() if core.threads]
        if stuck:
            raise self._deadlock(stuck)
        full = [
            (node.pe, node.colour)
            for nodes in (self.routers, self.outputs, self.inputs)
            for node in nodes.values()
            if node.words
        ]
        if full:
            pe, colour = min(full)
            raise self._error(Fault.STRANDED, pe, self.last_event, colour)

    def _deadlock(self, pes: list[int]) -> ArchitectureError:
        """The first instruction of the first PE: without words in its input queue it waits for them, else for room."""
        pe, threads = pes[0], self.cores[pes[0]].threads
        operation = threads[min(threads)]
        lacks_words = operation.source is not None and not self.inputs[pe, operation.source].words
        colour = operation.source if lacks_words else operation.target
        assert colour is not None
        other = pes[1] if len(pes) > 1 else None
        stuck = Stuck(lacks_words=lacks_words, num_words=operation.remaining, num_others=len(pes) - 1, other=other)
        return locate(self.image, Fault.DEADLOCK, pe, self.last_event, colour, stuck)

    def _error(self, fault: Fault, pe: int, cycle: int, detail: int) -> ArchitectureError:
        return locate(self.image, fault, pe, cycle, detail)

    @property
    def busy_cycles(self) -> int:
        return sum(core.busy_cycles for core in self.cores.values())

    @property
    def num_hops(self) -> int:
        """Words moved by routers, each counted once however many outputs it left by."""
        return sum(node.num_fired for node in self.routers.values())


class _Located(Exception):
    def __init__(self, fault: Fault, pe: int, detail: int) -> None:
        self.fault, self.pe, self.detail = fault, pe, detail
