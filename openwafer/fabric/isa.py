"""What a PE can do: operations, operands, and the row of integers that an instruction is encoded as.

The encoding is the contract between `program.py`, which writes it, and the two machines that run it
(`reference.py` and the C engine). One instruction is `INSTRUCTION_WORDS` 32-bit integers, see `Field`.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from openwafer.errors import UserError

INSTRUCTION_WORDS = 24
MAX_LENGTH = 48 * 1024  # elements of one instruction
NONE = -1  # in encoded instructions only: no register, no thread, no task


class Dtype(IntEnum):
    f32 = 0
    f16 = 1
    bf16 = 2
    i32 = 3
    i16 = 4

    @property
    def num_bytes(self) -> int:
        return 4 if self in (Dtype.f32, Dtype.i32) else 2

    @property
    def numpy(self) -> np.dtype:
        """How the host sees such an array; bfloat16 travels as its upper 16 bits."""
        return np.dtype(["<f4", "<f2", "<u2", "<i4", "<i2"][self])


class Op(IntEnum):
    # Vectors: dst[i] = f(a[i], b[i]). MAC adds a*b to dst; over fabric every op may read or write a stream.
    MOV = 0
    ADD = 1
    SUB = 2
    MUL = 3
    MAX = 4
    MAC = 5
    EXP = 6
    RSQRT = 7
    RECIP = 8
    CONVERT = 9  # dst has the type in IMM
    # Vector to register, in order, in fp32: reg = f(reg, a[i], b[i])
    SUM = 10
    DOT = 11
    MAXOF = 12
    # C[M, N] += A[M, K] @ B[K, N], column-major: K*N multiply-accumulate instructions of M elements each;
    # the outer loop runs over K, or over N if IMM is 1
    TILE = 13
    # One control wavelet: routers that forward it advance that colour's switch
    CONTROL = 14
    # Registers: SET reg = IMM; I* are integer, F* are fp32
    SET = 15
    IADD = 16
    IMUL = 17
    FADD = 18
    FMUL = 19
    FMAX = 20
    FEXP = 21
    FRSQRT = 22
    FRECIP = 23
    LOAD = 24
    STORE = 25
    UNPACK = 26  # wavelet (index << 16 | fp16 value): dst = index, a = source, b = register for the fp32 value
    # Control flow
    LOOP = 27
    ENDLOOP = 28
    BRANCH = 29  # to IMM if register a is zero
    ACTIVATE = 30
    BLOCK = 31
    UNBLOCK = 32
    END = 33
    WAIT = 34  # until thread IMM has completed; takes a task start, as a callback would
    ILT = 35  # dst = a < b
    IEQ = 36  # dst = a == b
    ADVANCE = 37  # the switch of colour IMM in this PE's own router, from the next cycle on


VECTOR_OPS = frozenset(range(Op.MOV, Op.MAXOF + 1))
SLOW_VECTOR_OPS = frozenset({Op.EXP, Op.RSQRT, Op.RECIP})
REDUCING_OPS = frozenset({Op.SUM, Op.DOT, Op.MAXOF})
SLOW_SCALAR_OPS = frozenset({Op.FEXP, Op.FRSQRT, Op.FRECIP})


class Kind(IntEnum):
    NONE = 0
    MEM = 1
    FABRIC = 2
    REG = 3


class Field(IntEnum):
    """Columns of an encoded instruction. An operand is four: kind, base, register added to it, stride."""

    OP = 0
    DTYPE = 1
    LENGTH = 2
    LENGTH_REG = 3
    DST = 4
    A = 8
    B = 12
    THREAD = 16
    THEN = 17
    IMM = 18  # a value; ENDLOOP: cycles; CONVERT: type; BRANCH: target; WAIT: thread; ACTIVATE...: task
    N = 19  # TILE: columns of B and C
    K = 20  # TILE: columns of A, rows of B
    TARGET = 21  # LOOP: index of its ENDLOOP, and the other way round
    SKIP_ZEROS = 22


@dataclass(frozen=True)
class Reg:
    """A 32-bit register of a PE."""

    index: int


@dataclass(frozen=True)
class Fabric:
    """A stream of wavelets: of a colour's input queue as a source, of its output queue as a destination."""

    colour: int


@dataclass(frozen=True)
class Mem:
    """Elements of SRAM: `length` of them from byte `base` (plus a register, in bytes), `stride` elements apart."""

    base: int
    length: int
    dtype: Dtype
    stride: int = 1
    offset: Reg | None = None

    def __getitem__(self, part: slice) -> "Mem":
        """A part of it; unlike Python's own slices, bounds outside it are an error: a PE has nothing there."""
        if not isinstance(part, slice):
            example = f"[{part}:{part + 1}]" if isinstance(part, int) else "[2:5]"
            raise UserError(f"a part of an array is a slice, such as {example}, got [{part!r}]")
        for bound in (part.start, part.stop):
            if bound is not None and not -self.length <= bound <= self.length:
                raise UserError(f"slice bound {bound} is outside an array of {self.length} elements")
        start, stop, step = part.indices(self.length)
        base = self.base + start * self.stride * self.dtype.num_bytes
        return replace(self, base=base, length=len(range(start, stop, step)), stride=self.stride * step)

    def at(self, offset: Reg, length: int | None = None) -> "Mem":
        """The same descriptor moved by a register's value in bytes."""
        if not isinstance(offset, Reg):
            raise UserError(f"at() takes a register with an offset in bytes, got {offset!r}: for a fixed one, slice")
        return replace(self, offset=offset, length=self.length if length is None else length)


Operand = Mem | Fabric | Reg


def encode_operand(operand: Operand | None) -> list[int]:
    if operand is None:
        return [Kind.NONE, 0, NONE, 0]
    if isinstance(operand, Mem):
        register = NONE if operand.offset is None else operand.offset.index
        return [Kind.MEM, operand.base, register, operand.stride]
    if isinstance(operand, Fabric):
        return [Kind.FABRIC, operand.colour, NONE, 0]
    return [Kind.REG, operand.index, NONE, 0]
