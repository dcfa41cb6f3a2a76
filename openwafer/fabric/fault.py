"""Architecture errors: what a program did that the machine cannot do, where and when."""

from enum import IntEnum

from openwafer.errors import UserError
from openwafer.fabric.isa import MAX_LENGTH


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
    Fault.OUT_OF_BOUNDS: "instruction {detail} reaches outside the PE's memory, or has more than "
    f"{MAX_LENGTH} elements",
    Fault.QUEUE_BUSY: "colour {detail} is already in use by another instruction of this PE: wait for its completion",
    Fault.THREAD_BUSY: "thread {detail} is still running: use another one or wait for its completion",
    Fault.DEADLOCK: "deadlock: an instruction waits on colour {detail} and nothing moves any more",
    Fault.STRANDED: "the program ended with wavelets of colour {detail} left in the fabric: receive them",
    Fault.CYCLE_LIMIT: "the cycle limit is reached; raise max_cycles if the program is meant to run longer",
    Fault.NO_MEMORY: "the simulator ran out of host memory",
}


class ArchitectureError(UserError):
    """A program broke a rule of the machine at a PE in a cycle."""

    def __init__(self, fault: Fault, pe: tuple[int, int], cycle: int, detail: int) -> None:
        self.fault, self.pe, self.cycle, self.detail = fault, pe, cycle, detail
        reason = REASONS[fault].format(detail=detail)
        super().__init__(f"PE ({pe[0]}, {pe[1]}), cycle {cycle}: {reason}")
