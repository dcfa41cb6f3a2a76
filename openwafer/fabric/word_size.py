"""Both ends of a colour must agree on the size of its elements: what a layout can tell from its programs.

A word that was sent as fp16 is no fp32 number. Only what is certain is refused: floats at both ends, and nobody of the
other end who uses that size. Integers and words with an index may be taken apart on purpose, and tasks on a colour
get words as they come.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from openwafer.fabric.isa import VECTOR_OPS, Dtype, Field, Kind
from openwafer.fabric.program import Program

FLOATS = frozenset({Dtype.f32, Dtype.f16, Dtype.bf16})


@dataclass
class _Ends:
    """Of a colour: which programs send and receive it as what."""

    sent: dict[Dtype, set[int]] = field(default_factory=dict)
    received: dict[Dtype, set[int]] = field(default_factory=dict)
    is_known: bool = True


@dataclass(frozen=True)
class Clash:
    programs: frozenset[int]  # indices
    reason: str


def clashes(programs: list[Program], placed: Iterable[int]) -> list[Clash]:
    """What is wrong with the programs of a layout, of which those at the indices `placed` have PEs."""
    colours: dict[int, _Ends] = {}
    for index in placed:
        _add_ends(colours, index, programs[index])
    return [clash for colour, ends in colours.items() if ends.is_known for clash in _clashes_of(colour, ends)]


def _add_ends(colours: dict[int, _Ends], index: int, program: Program) -> None:
    for task in program.tasks:
        if task.colour is not None:
            colours.setdefault(task.colour, _Ends()).is_known = False
    for row in program.code.tolist():
        if row[Field.OP] not in VECTOR_OPS:
            continue
        for operand in (Field.DST, Field.A, Field.B):
            if row[operand] == Kind.FABRIC:
                ends, dtype = colours.setdefault(row[operand + 1], _Ends()), Dtype(row[Field.DTYPE])
                (ends.sent if operand == Field.DST else ends.received).setdefault(dtype, set()).add(index)
                ends.is_known &= dtype in FLOATS and not row[Field.SKIP_ZEROS]


def _clashes_of(colour: int, ends: _Ends) -> Iterable[Clash]:
    sent, received = (", ".join(dtype.name for dtype in sorted(end)) for end in (ends.sent, ends.received))
    for dtype, programs in ends.received.items():
        if ends.sent and all(other.num_bytes != dtype.num_bytes for other in ends.sent):
            fix = "receive what is sent, and convert it"
            yield Clash(frozenset(programs), f"colour {colour} is received as {dtype.name}, but sent as {sent}: {fix}")
    for dtype, programs in ends.sent.items():
        if ends.received and all(other.num_bytes != dtype.num_bytes for other in ends.received):
            fix = "convert before the send, or after the receive"
            yield Clash(
                frozenset(programs), f"colour {colour} is sent as {dtype.name}, but received as {received}: {fix}"
            )
