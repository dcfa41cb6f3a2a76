"""What operands an instruction may have: checked when a program is built, because no machine checks it again."""

import operator
from collections.abc import Iterable
from difflib import get_close_matches

from openwafer.errors import UserError
from openwafer.fabric.isa import (
    MAX_LENGTH,
    REDUCING_OPS,
    SLOW_SCALAR_OPS,
    SLOW_VECTOR_OPS,
    VECTOR_OPS,
    Dtype,
    Fabric,
    Mem,
    Op,
    Operand,
    Reg,
)

ONE_SOURCE = frozenset({Op.MOV, Op.CONVERT, Op.SUM, Op.MAXOF}) | SLOW_VECTOR_OPS
INTEGER_SCALARS = frozenset({Op.IADD, Op.IMUL, Op.ILT, Op.IEQ})
FLOAT_SCALARS = frozenset({Op.FADD, Op.FMUL, Op.FMAX})
KIND_NAMES = {Mem: "memory (an array or a slice of it)", Fabric: "a stream", Reg: "a register"}
VECTOR_OPTIONS = ("length", "dtype", "thread", "then", "skip_zeros")


def check_operand(op: Op, name: str, operand: object, kinds: tuple[type, ...] = (Mem, Fabric, Reg)) -> None:
    """Its Python type, before anything looks into it."""
    if not isinstance(operand, kinds):
        allowed = " or ".join(KIND_NAMES[kind] for kind in kinds)
        fix = ": put the number into a register with pe.set" if isinstance(operand, int | float) else ""
        raise UserError(f"{op.name}: {name} must be {allowed}, got {operand!r}{fix}")


def check_options(op: Op, options: Iterable[str]) -> None:
    for option in options:
        if option not in VECTOR_OPTIONS:
            close = get_close_matches(option, VECTOR_OPTIONS, 1)
            hint = f"did you mean {close[0]}=?" if close else f"there are {', '.join(VECTOR_OPTIONS)}"
            raise UserError(f"{op.name} has no option {option}=: {hint}")


def check_vector(op: Op, dtype: Dtype, dst: Operand, a: Operand, b: Operand | None) -> None:
    """The kinds of the operands."""
    if op not in VECTOR_OPS:
        raise UserError(f"{op.name} is no vector instruction")
    if op in SLOW_VECTOR_OPS and dtype in (Dtype.i32, Dtype.i16):
        raise UserError(f"{op.name} is for floats, got {dtype.name}: convert first")
    if (b is None) != (op in ONE_SOURCE):
        raise UserError(f"{op.name} takes {'one source' if op in ONE_SOURCE else 'two sources'}")
    if isinstance(a, Fabric) and isinstance(b, Fabric):
        raise UserError(f"{op.name} reads two streams: receive one into memory first")
    if op in REDUCING_OPS and not isinstance(dst, Reg):
        raise UserError(f"{op.name} makes one number of a vector: its destination is a register")
    if op is Op.MAC and not isinstance(dst, Mem):
        raise UserError("MAC adds to its destination, which must be memory: send the result with MOV")
    if op is Op.CONVERT and not (isinstance(dst, Mem) and isinstance(a, Mem)):
        raise UserError("CONVERT goes from memory to memory: send the result with MOV")


def check_memory(op: Op, operands: list[Mem], length: int | Reg, dtype: Dtype | None) -> None:
    """All memory operands hold elements of `dtype` (None: of any), and `length` of them."""
    if not isinstance(length, int | Reg):
        raise UserError(f"{op.name}: length must be an integer or a register, got {length!r}")
    if isinstance(length, int) and not 0 <= length <= MAX_LENGTH:
        raise UserError(f"{op.name}: length must be from 0 to {MAX_LENGTH}, got {length}")
    for operand in operands:
        if dtype is not None and operand.dtype is not dtype:
            raise UserError(
                f"{op.name}: operands of {dtype.name} and {operand.dtype.name}: convert one, or say dtype= to read "
                f"its bits as they are"
            )
        if isinstance(length, int) and operand.length < length:
            raise UserError(f"{op.name}: length={length}, and an operand has {operand.length} elements")


def check_equal_lengths(op: Op, operands: list[Mem]) -> None:
    """For instructions that do not say their length."""
    lengths = [operand.length for operand in operands]
    if len(set(lengths)) > 1:
        several = " and ".join(str(length) for length in dict.fromkeys(lengths))
        raise UserError(f"{op.name}: operands of {several} elements: slice them to equal lengths, or say length=")


def check_skip_zeros(op: Op, dst: Operand, streams: list[Fabric], dtype: Dtype) -> None:
    """A wavelet with an index has 16 bits for the value."""
    if not isinstance(dst, Fabric) or len(streams) > 1 or dtype is not Dtype.f16:
        raise UserError(f"{op.name}: skip_zeros is for sends of f16 from memory or a register")


def check_scalar(op: Op, b: Reg | int | None) -> None:
    if op not in INTEGER_SCALARS | FLOAT_SCALARS | SLOW_SCALAR_OPS:
        raise UserError(f"{op.name} is no instruction over registers")
    if (b is None) != (op in SLOW_SCALAR_OPS):
        raise UserError(f"{op.name} takes {'one source' if op in SLOW_SCALAR_OPS else 'two sources'}")
    if op in FLOAT_SCALARS and not isinstance(b, Reg):
        raise UserError(f"{op.name} takes registers: put {b} into one with pe.set")
    if isinstance(b, int):
        register_number(b)
    elif b is not None:
        check_operand(op, "the second source", b, (Reg,))


def whole_number(value: int) -> int:
    """Integers of NumPy as those of Python, which they are no instances of."""
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"expected a whole number, got {value!r}") from None


def register_number(value: int) -> int:
    number = whole_number(value)
    if not -(2**31) <= number < 2**31:
        raise UserError(f"a register holds 32 bits with sign, got {number}")
    return number
