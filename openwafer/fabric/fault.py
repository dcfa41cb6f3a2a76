"""Architecture errors: what a program did that the machine cannot do, where and when. Both machines say the same."""

from dataclasses import dataclass
from enum import IntEnum

from openwafer.errors import UserError
from openwafer.fabric.image import Image
from openwafer.fabric.isa import MAX_LENGTH, NONE, Field, Kind, Op
from openwafer.fabric.program import Program


class Fault(IntEnum):
    """Codes shared with the C engine."""

    NONE = 0
    COLLISION = 1
    OUT_OF_BOUNDS = 2
    QUEUE_BUSY = 3
    THREAD_BUSY = 4
    DEADLOCK = 5
    STRANDED = 6
    CYCLE_LIMIT = 7
    NO_MEMORY = 8


REASONS = {
    Fault.COLLISION: "colour {detail} arrives from two inputs in one cycle: switch between them with control wavelets",
    Fault.OUT_OF_BOUNDS: "instruction {detail} {note}",
    Fault.QUEUE_BUSY: "colour {detail} is already in use by another instruction of this PE: wait for its completion",
    Fault.THREAD_BUSY: "thread {detail} is still running: use another one or wait for its completion",
    Fault.DEADLOCK: "deadlock, nothing moves any more: an instruction waits for {note}",
    Fault.STRANDED: "the program ended with wavelets of colour {detail} left in the fabric: receive them",
    Fault.CYCLE_LIMIT: "the cycle limit is reached; raise max_cycles if the program is meant to run longer",
    Fault.NO_MEMORY: "the simulator ran out of host memory",
}


class ArchitectureError(UserError):
    """A program broke a rule of the machine at a PE in a cycle."""

    def __init__(self, fault: Fault, pe: tuple[int, int], cycle: int, detail: int, note: str = "") -> None:
        self.fault, self.pe, self.cycle, self.detail = fault, pe, cycle, detail
        reason = REASONS[fault].format(detail=detail, note=note)
        super().__init__(f"PE ({pe[0]}, {pe[1]}), cycle {cycle}: {reason}")


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """What a deadlock is about: the first instruction of the first PE that cannot go on, and who else cannot."""

    lacks_words: bool  # or room in its output queue
    num_words: int  # that it has still to move
    num_others: int  # PEs
    other: int | None  # the first of them

    def describe(self, colour: int, width: int) -> str:
        words = f"{self.num_words} more word{'s' if self.num_words > 1 else ''} of colour {colour}"
        what = words if self.lacks_words else f"room to send {words}"
        if self.other is None:
            return what
        others = "1 other PE is" if self.num_others == 1 else f"{self.num_others} other PEs are"
        return f"{what}; {others} stuck too, the first is ({self.other % width}, {self.other // width})"


def locate(
    image: Image, fault: Fault, pe: int, cycle: int, detail: int, stuck: Stuck | None = None
) -> ArchitectureError:
    """The error with all that the image knows of PE number `pe`; `stuck` comes with a deadlock."""
    width, note = image.layout.width, ""
    if fault is Fault.OUT_OF_BOUNDS:
        note = _describe_reach(image.layout.programs[image.program_of[pe]], detail, image.registers[pe].tolist())
    elif stuck is not None:
        note = stuck.describe(detail, width)
    return ArchitectureError(fault, (pe % width, pe // width), cycle, detail, note)


def _describe_reach(program: Program, index: int, registers: list[int]) -> str:
    """Which task and arrays an instruction out of bounds belongs to, and the registers that made it so."""
    row = program.code[index].tolist()
    task = max((task for task in program.tasks if task.entry <= index), key=lambda task: task.entry)
    causes = []
    for at in (Field.DST, Field.A, Field.B):
        if row[at] == Kind.MEM and row[at + 2] != NONE:
            causes.append(f"array {_array_at(program, row[at + 1])!r} is moved by {registers[row[at + 2]]} bytes")
    if row[Field.LENGTH_REG] != NONE:
        causes.append(f"its length is {registers[row[Field.LENGTH_REG]]}")
    where = f"({Op(row[Field.OP]).name} in task {task.name!r} of {program.name!r})"
    reasons = f": {', '.join(dict.fromkeys(causes))}" if causes else ""
    limits = f"reaches outside the PE's memory or between elements, or has more than {MAX_LENGTH} elements"
    return f"{where} {limits}{reasons}"


def _array_at(program: Program, byte: int) -> str:
    """The array that starts last before it."""
    return max((array.base, name) for name, array in program.arrays.items() if array.base <= byte)[1]
