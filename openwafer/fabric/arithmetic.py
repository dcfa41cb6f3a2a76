"""What the instructions compute, element by element, in NumPy: the definition of the C engine's values.

16-bit floats are computed in fp32 and rounded once; fp32 products and sums round separately; integers wrap. Floats
become integers towards zero; those outside the range become its ends, NaN becomes 0.
Exponentials, reciprocals and roots are computed in double precision and rounded.
"""

import math
import struct

import numpy as np

from openwafer.fabric.image import bf16_to_float, float_to_bf16
from openwafer.fabric.isa import Dtype, Op


def unpack(raw: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Bytes of elements -> fp32 or int32 values."""
    elements = np.ascontiguousarray(raw).view(dtype.numpy)
    if dtype is Dtype.bf16:
        return bf16_to_float(elements)
    return elements.astype(np.int32 if dtype in (Dtype.i32, Dtype.i16) else np.float32)


def pack(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """fp32 or int32 values -> elements, rounded to nearest even (floats) or wrapped (integers)."""
    if dtype is Dtype.bf16:
        return float_to_bf16(values)
    if dtype in (Dtype.i32, Dtype.i16) and values.dtype.kind == "f":  # converted: towards zero, within the range
        limits = np.iinfo(dtype.numpy)
        return np.clip(np.nan_to_num(values.astype(np.float64)), limits.min, limits.max).astype(dtype.numpy)
    with np.errstate(over="ignore"):
        return values.astype(dtype.numpy)


def to_words(elements: np.ndarray) -> np.ndarray:
    """Elements -> 32-bit wavelets, one each; 16-bit elements fill the lower half."""
    if elements.dtype.itemsize == 2:
        return np.ascontiguousarray(elements).view(np.uint16).astype(np.uint32)
    return np.ascontiguousarray(elements).view(np.uint32)


def from_words(words: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Wavelets -> values."""
    bits = np.ascontiguousarray(words, np.uint32)
    return unpack((bits.astype(np.uint16) if dtype.num_bytes == 2 else bits).view(np.uint8), dtype)


def scalar_value(register: int, dtype: Dtype) -> np.ndarray:
    """A register as an operand: an int32, or an fp32."""
    bits = np.array([register], np.int32)
    return bits if dtype in (Dtype.i32, Dtype.i16) else bits.view(np.float32)


def compute(op: Op, a: np.ndarray, b: np.ndarray | None, dst: np.ndarray | None) -> np.ndarray:
    """The values of a vector instruction before they are rounded to its type."""
    with np.errstate(all="ignore"):
        if op in (Op.MOV, Op.CONVERT):
            return a
        if op in (Op.EXP, Op.RSQRT, Op.RECIP):
            function = {Op.EXP: exponential, Op.RSQRT: reciprocal_root, Op.RECIP: reciprocal}[op]
            return np.array([function(float(x)) for x in a], np.float32)
        assert b is not None
        if op is Op.ADD:
            return a + b
        if op is Op.SUB:
            return a - b
        if op is Op.MUL:
            return a * b
        if op is Op.MAX:
            return np.where(a > b, a, b)
        assert dst is not None, op
        return dst + a * b


def reduce(op: Op, start: np.float32, a: np.ndarray, b: np.ndarray | None) -> np.float32:
    """SUM, DOT and MAXOF: in order, in fp32."""
    total = np.float32(start)
    values = a.astype(np.float32)
    with np.errstate(all="ignore"):
        if op is Op.DOT:
            assert b is not None
            values = values * b.astype(np.float32)
        for value in values:
            total = np.float32(
                value if op is Op.MAXOF and value > total else total if op is Op.MAXOF else total + value
            )
    return total


def exponential(x: float) -> float:
    try:
        return _rounded(math.exp(x))
    except OverflowError:
        return math.inf


def reciprocal(x: float) -> float:
    return _rounded(1.0 / x) if x != 0 else math.copysign(math.inf, x)


def reciprocal_root(x: float) -> float:
    if x < 0 or math.isnan(x):
        return math.nan
    return _rounded(1.0 / math.sqrt(x)) if x != 0 else math.inf


def _rounded(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def float_bits(value: float) -> int:
    return struct.unpack("<i", np.float32(value).tobytes())[0]


def bits_float(bits: int) -> np.float32:
    return np.frombuffer(struct.pack("<i", bits), np.float32)[0]


def wrap(value: int) -> int:
    """An integer as 32 bits with sign."""
    return (value + 2**31) % 2**32 - 2**31
