"""How many cycles an instruction of the main thread takes: the one place where start-up, SIMD and banks meet.

A 64-bit access covers two banks. Two operands that are read in the same cycle need different banks modulo 4;
otherwise each group takes twice as long. Operands that are strided or not 8-byte aligned are taken one by one.
On WSE-3 an instruction with two reads and a write per 16-bit group fills a write buffer; once it is full, every second
group waits a cycle for its write.
"""

from openwafer.fabric.isa import REDUCING_OPS, SLOW_SCALAR_OPS, SLOW_VECTOR_OPS, VECTOR_OPS, Dtype, Op
from openwafer.systems import Wafer


def vector_cycles(
    wafer: Wafer, op: Op, dtype: Dtype, length: int, sources: list[tuple[int, int]], dst: tuple[int, int] | None
) -> int:
    """Cycles of a vector instruction over memory; operands are (byte address, stride in elements)."""
    costs = wafer.costs
    if op in SLOW_VECTOR_OPS:
        return costs.vector_startup + length * costs.divide
    read = sources + ([dst] if dst is not None and op is Op.MAC else [])
    touched = sources + ([dst] if dst is not None else [])
    wide = all(stride == 1 and address % 8 == 0 for address, stride in touched)
    lanes = (2 if dtype.num_bytes == 4 else costs.simd_16) if wide else 1
    per_group = costs.group_cycles_16 if dtype.num_bytes == 2 and wide else 1
    banks = [address // wafer.bank_bytes % 4 for address, _ in read]
    conflict = len(set(banks)) < len(banks)
    groups = -(-length // lanes)
    cycles = costs.vector_startup + groups * per_group * (2 if conflict else 1) - costs.vector_overlap
    if dtype.num_bytes == 2 and wide and costs.write_buffer_16 is not None and dst is not None and len(read) > 1:
        cycles += max(0, groups - costs.write_buffer_16) // 2
    return max(costs.vector_minimum, cycles)


def tile_cycles(wafer: Wafer, dtype: Dtype, m: int, n: int, k: int, *, outer_n: bool = False) -> int:
    """Cycles of TILE: its columns are placed so that no two operands meet in a bank."""
    costs = wafer.costs
    column = vector_cycles(wafer, Op.MAC, dtype, m, [(0, 1)], (8, 1))
    return (n if outer_n else k) * costs.loop_outer + k * n * (costs.loop_inner + column)


def scalar_cycles(wafer: Wafer, op: Op, overhead: int) -> int:
    """Cycles of everything else; `overhead` is the IMM of ENDLOOP."""
    if op is Op.ENDLOOP:
        return overhead
    if op in SLOW_SCALAR_OPS:
        return wafer.costs.divide
    assert op not in VECTOR_OPS | REDUCING_OPS, op
    return 0 if op in (Op.LOOP, Op.END) else wafer.costs.scalar
