"""Where programs run and how colours are routed: rectangles of PEs, and the checks before anything starts.

x grows to the east, y to the south; PE (x, y) has index y * width + x.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from openwafer.errors import UserError
from openwafer.fabric.program import Program, ProgramBuilder
from openwafer.fabric.signature import register_number
from openwafer.fabric.word_size import clashes
from openwafer.systems import Wafer


class Direction(IntEnum):
    NORTH = 0
    EAST = 1
    SOUTH = 2
    WEST = 3
    RAMP = 4

    def __or__(self, other: object) -> int:
        # As numbers WEST | EAST would be WEST again.
        name = other.name if isinstance(other, Direction) else other
        raise UserError(f"several directions are a tuple, such as (WEST, EAST): got {self.name} | {name}")


NORTH, EAST, SOUTH, WEST, RAMP = Direction
NO_ROUTE = NO_PROGRAM = -1

Directions = int | Iterable[int]


class TooManyPes(UserError):
    """A layout is larger than the wafer."""


@dataclass(frozen=True)
class Rect:
    """PEs x, x+dx, ... below x+width and y, y+dy, ... below y+height."""

    x: int
    y: int
    width: int = 1
    height: int = 1
    dx: int = 1
    dy: int = 1

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.y, self.y + self.height, self.dy), slice(self.x, self.x + self.width, self.dx)


@dataclass(frozen=True)
class Route:
    """Per switch position: bit masks of the directions that may come in, and of those that go out."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ring: bool = False  # after the last position comes the first; otherwise the last stays


@dataclass
class Layout:
    """A rectangle of a wafer with its programs and routes."""

    wafer: Wafer
    width: int
    height: int
    programs: list[Program] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    program_of: np.ndarray = field(init=False)  # int16 [height, width], index into programs or -1
    route_of: dict[int, np.ndarray] = field(default_factory=dict)  # colour -> int16 [height, width]
    params: list[tuple[str, Rect, np.ndarray]] = field(default_factory=list)
    _placed: dict[Hashable, int] = field(default_factory=dict)  # program function and arguments -> program

    def __post_init__(self) -> None:
        wafer = self.wafer
        if not isinstance(wafer, Wafer):
            raise UserError(f"a layout takes a wafer, such as openwafer.systems.WSE2, got {wafer!r}")
        if not (1 <= self.width <= wafer.usable_columns and 1 <= self.height <= wafer.usable_rows):
            raise TooManyPes(
                f"a layout of {self.width} x {self.height} PEs does not fit {wafer.name}: "
                f"at most {wafer.usable_columns} x {wafer.usable_rows}"
            )
        self.program_of = np.full((self.height, self.width), NO_PROGRAM, np.int16)

    @property
    def everywhere(self) -> Rect:
        return Rect(0, 0, self.width, self.height)

    def place(
        self, function: Callable[..., None], rect: Rect | np.ndarray | None = None, **arguments: object
    ) -> Program:
        """Run `function(pe, **arguments)` on every PE of `rect` (everywhere by default; or a mask [height, width])."""
        if isinstance(rect, np.ndarray) and (rect.dtype != bool or rect.shape != self.program_of.shape):
            wanted, given = f"bool {self.program_of.shape}", f"{rect.dtype} {rect.shape}"
            raise UserError(f"a mask of PEs (rows, columns) must be {wanted}, got {given}")
        key = (function, tuple(sorted(arguments.items())))
        index = self._placed.get(key) if _hashable(key) else None
        if index is None:
            builder = ProgramBuilder(self.wafer, getattr(function, "__name__", "program"))
            function(builder, **arguments)
            if len(self.programs) > np.iinfo(self.program_of.dtype).max:
                raise UserError(
                    f"{builder.name}: more than {len(self.programs)} programs: PEs share one if its arguments are "
                    "equal and hashable (tuples, not lists or dicts)"
                )
            self.programs.append(builder.build())
            index = len(self.programs) - 1
            if _hashable(key):
                self._placed[key] = index
        where = rect if isinstance(rect, np.ndarray) else self.inside(rect)
        self._complain_taken(self.program_of, where, index, "has a program already: place one on each PE")
        self.program_of[where] = index
        return self.programs[index]

    def param(self, name: str, values: np.ndarray | float, rect: Rect | None = None) -> None:
        """Set a `pe.param` register of every PE of `rect`: integers as they are, floats as fp32."""
        rect = self.everywhere if rect is None else rect
        array = np.asarray(values)
        bits = _register_bits(name, array)
        shape = self.program_of[self.inside(rect)].shape
        try:
            self.params.append((name, rect, np.broadcast_to(bits, shape)))
        except ValueError:
            raise UserError(
                f"param {name!r} of {shape} PEs (rows, columns) takes so many values, got {array.shape}"
            ) from None

    def route(self, colour: int, rect: Rect | None, inputs: Directions, outputs: Directions) -> None:
        """In every router of `rect`, wavelets of `colour` come from `inputs` and leave to all `outputs`."""
        self.switch(colour, rect, [(inputs, outputs)])

    def switch(
        self, colour: int, rect: Rect | None, positions: list[tuple[Directions, Directions]], *, ring: bool = False
    ) -> None:
        """Like `route` with several switch positions. A control wavelet advances to the next; the last one stays, or
        is followed by the first in a `ring`."""
        wafer = self.wafer
        if colour not in range(wafer.num_colours):
            raise UserError(f"colour must be from 0 to {wafer.num_colours - 1}, got {colour}")
        if not 1 <= len(positions) <= wafer.num_switch_positions:
            raise UserError(f"a switch has 1 to {wafer.num_switch_positions} positions, got {len(positions)}")
        route = Route(tuple(_mask(i) for i, _ in positions), tuple(_mask(o) for _, o in positions), ring)
        if route not in self.routes:
            self.routes.append(route)
        if colour not in self.route_of:
            self.route_of[colour] = np.full((self.height, self.width), NO_ROUTE, np.int16)
        where, index = self.inside(rect), self.routes.index(route)
        twice = f"has another route of colour {colour} already: give all its directions or positions at once"
        self._complain_taken(self.route_of[colour], where, index, twice)
        self.route_of[colour][where] = index

    def inside(self, rect: Rect | None) -> tuple[slice, slice]:
        """Rows and columns of `rect` (None: everywhere), which must lie in the layout."""
        rect = self.everywhere if rect is None else rect
        if min(rect.width, rect.height) < 0 or min(rect.dx, rect.dy) < 1:
            raise UserError(f"{rect}: sizes must not be negative, steps at least 1")
        if rect.x < 0 or rect.y < 0 or rect.x + rect.width > self.width or rect.y + rect.height > self.height:
            raise UserError(f"{rect} reaches outside the layout of {self.width} x {self.height} PEs")
        return rect.slices

    # -- checks ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every wavelet that can leave somewhere must be taken there, as what it was; every queue must be reachable."""
        for colour, route_of in self.route_of.items():
            inputs, outputs = self._any_position(route_of)
            for direction in (NORTH, EAST, SOUTH, WEST):
                self._check_links(colour, direction, inputs, outputs)
            takes = self._programs_with(colour, "inputs")
            self._complain(
                (outputs >> RAMP & 1 == 1) & ~takes,
                f"colour {colour} goes to the RAMP, but its program never receives it",
            )
        for colour in {c for program in self.programs for c in program.advances}:
            wrong = self._programs_with(colour, "advances") & (self._routes_of(colour) == NO_ROUTE)
            self._complain(wrong, f"colour {colour} is advanced by the core, but its router has no route for it")
        for colour in {c for program in self.programs for c in program.outputs}:
            inputs, _ = self._any_position(self._routes_of(colour))
            missing = self._programs_with(colour, "outputs") & (inputs >> RAMP & 1 == 0)
            self._complain(missing, f"colour {colour} is sent, but no route takes it from the RAMP")
        for colour in {c for program in self.programs for c in program.inputs}:
            _, outputs = self._any_position(self._routes_of(colour))
            missing = self._programs_with(colour, "inputs") & (outputs >> RAMP & 1 == 0)
            self._complain(missing, f"colour {colour} is received, but no route takes it to the RAMP")
        placed = [index for index in np.unique(self.program_of).tolist() if index != NO_PROGRAM]
        for clash in clashes(self.programs, placed):
            self._complain(np.isin(self.program_of, [*clash.programs]), clash.reason)

    def _routes_of(self, colour: int) -> np.ndarray:
        return self.route_of.get(colour, np.full((self.height, self.width), NO_ROUTE, np.int16))

    def _any_position(self, route_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        table = np.zeros((len(self.routes) + 1, 2), np.uint8)  # the last row is read for NO_ROUTE = -1
        for index, route in enumerate(self.routes):
            table[index] = [np.bitwise_or.reduce(route.inputs), np.bitwise_or.reduce(route.outputs)]
        return table[route_of, 0], table[route_of, 1]

    def _programs_with(self, colour: int, queues: str) -> np.ndarray:
        uses = np.array([colour in getattr(p, queues) for p in self.programs] + [False])
        return uses[self.program_of]

    def _check_links(self, colour: int, direction: int, inputs: np.ndarray, outputs: np.ndarray) -> None:
        taken = np.zeros(inputs.shape, bool)
        accepts = inputs >> opposite(direction) & 1 == 1
        if direction == NORTH:
            taken[1:] = accepts[:-1]
        elif direction == SOUTH:
            taken[:-1] = accepts[1:]
        elif direction == EAST:
            taken[:, :-1] = accepts[:, 1:]
        else:
            taken[:, 1:] = accepts[:, :-1]
        leaves = outputs >> direction & 1 == 1
        name = Direction(direction).name
        self._complain(leaves & ~taken, f"colour {colour} leaves to the {name}, where no route takes it")

    def _complain_taken(
        self, table: np.ndarray, where: tuple[slice, slice] | np.ndarray, index: int, reason: str
    ) -> None:
        """Nothing is overwritten without a word; the same again is no harm."""
        taken = (table[where] != NO_ROUTE) & (table[where] != index)
        if taken.any():
            wrong = np.zeros(table.shape, bool)
            wrong[where] = taken
            self._complain(wrong, reason)

    def _complain(self, wrong: np.ndarray, reason: str) -> None:
        if wrong.any():
            y, x = (int(i) for i in np.argwhere(wrong)[0])
            count = int(wrong.sum())
            others = "" if count == 1 else f"; {count} PEs are wrong in this way"
            raise UserError(f"PE ({x}, {y}): {reason}{others}")


def opposite(direction: int) -> int:
    return (direction + 2) % 4


def _register_bits(name: str, values: np.ndarray) -> np.ndarray:
    """int32 of the values' shape, or why they fit no register."""
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            floats = values.astype(np.float32)
        if np.isinf(floats[np.isfinite(values)]).any():
            raise UserError(f"param {name!r}: a register holds fp32, got {np.abs(values[np.isfinite(values)]).max()}")
        return floats.view(np.int32)
    numbers = values.ravel().tolist()  # Python's, also those that no NumPy integer holds
    if not all(isinstance(number, int) for number in numbers):
        raise UserError(f"param {name!r} takes integers or floats, got {values.dtype} {numbers[:1]}")
    try:
        for number in (min(numbers, default=0), max(numbers, default=0)):
            register_number(number)
    except UserError as error:
        raise UserError(f"param {name!r}: {error}") from None
    return values.astype(np.int32)


def _hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _mask(directions: Directions) -> int:
    several = [directions] if isinstance(directions, int | float | str) else list(directions)
    for direction in several:
        if not isinstance(direction, int) or direction not in range(5):
            raise UserError(f"a direction is NORTH, EAST, SOUTH, WEST or RAMP, got {direction!r}")
    return sum(1 << direction for direction in set(several))
