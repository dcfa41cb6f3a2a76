"""A checked layout with its memory: what a machine starts from, and what the host copies into and out of."""

import numpy as np

from openwafer.errors import UserError
from openwafer.fabric.isa import Dtype
from openwafer.fabric.layout import Layout, Rect


class Image:
    """The memory and registers of all PEs. PEs of one program lie together, each with only what it declared."""

    def __init__(self, layout: Layout) -> None:
        layout.check()
        self.layout = layout
        self.program_of = np.ascontiguousarray(layout.program_of.ravel())
        self.row_of = np.zeros(self.program_of.size, np.int64)  # PE -> its row in its program's block
        self.memory_offset = np.zeros(self.program_of.size, np.int64)
        sizes = [(program.memory_bytes + 7) // 8 * 8 for program in layout.programs]
        members = [np.flatnonzero(self.program_of == index) for index in range(len(sizes))]
        total = sum(size * len(pes) for size, pes in zip(sizes, members, strict=True))
        self.memory = np.zeros(max(total, 8), np.uint8)
        self.blocks: list[np.ndarray] = []
        start = 0
        for size, pes in zip(sizes, members, strict=True):
            self.blocks.append(self.memory[start : start + size * len(pes)].reshape(len(pes), size))
            self.row_of[pes] = np.arange(len(pes))
            self.memory_offset[pes] = start + size * np.arange(len(pes))
            start += size * len(pes)
        self.num_registers = layout.wafer.num_registers
        self.registers = np.zeros((self.program_of.size, self.num_registers), np.int32)
        self._set_params()

    def _set_params(self) -> None:
        known = {name for program in self.layout.programs for name in program.params}
        grid = np.arange(self.program_of.size).reshape(self.layout.height, self.layout.width)
        for name, rect, bits in self.layout.params:
            if name not in known:
                raise UserError(f"no program has a param {name!r}; there are {', '.join(sorted(known)) or 'none'}")
            pes = grid[rect.slices].ravel()
            for index, program in enumerate(self.layout.programs):
                if name in program.params:
                    chosen = self.program_of[pes] == index
                    self.registers[pes[chosen], program.params[name]] = bits.ravel()[chosen]

    def write(self, name: str, values: np.ndarray, rect: Rect | None = None) -> int:
        """Copy `values` into array `name` of the PEs of `rect` that have it: [pes, elements], or one row for all.

        Returns the number of 32-bit words that crossed the edge of the wafer.
        """
        pes, dtype, length = self._owners(name, rect)
        check_range(name, np.asarray(values), dtype)
        data = to_elements(np.asarray(values), dtype)
        shape = (len(pes), length)
        if data.size == length:
            data = np.broadcast_to(data.reshape(length), shape)
        elif data.size != len(pes) * length:
            raise UserError(f"array {name!r} of {len(pes)} PEs takes {shape} values, got {np.asarray(values).shape}")
        data = np.ascontiguousarray(data.reshape(shape)).view(np.uint8).reshape(len(pes), -1)
        for block, rows, chosen, base in self._pieces(name, pes):
            block[rows, base : base + data.shape[1]] = data[chosen]
        return -(-data.size // 4)

    def read(self, name: str, rect: Rect | None = None) -> np.ndarray:
        """Array `name` of the PEs of `rect` that have it, in order of y then x: [pes, elements]; bf16 as float32."""
        pes, dtype, length = self._owners(name, rect)
        num_bytes = length * dtype.num_bytes
        data = np.empty((len(pes), num_bytes), np.uint8)
        for block, rows, chosen, base in self._pieces(name, pes):
            data[chosen] = block[rows, base : base + num_bytes]
        return from_elements(data.view(dtype.numpy), dtype)

    def _owners(self, name: str, rect: Rect | None) -> tuple[np.ndarray, Dtype, int]:
        layout = self.layout
        owns = np.array([name in program.arrays for program in layout.programs] + [False])
        mask = np.zeros((layout.height, layout.width), bool)
        mask[layout.inside(rect)] = True
        pes = np.flatnonzero(mask.ravel() & owns[self.program_of])
        kinds = {(p.arrays[name].dtype, p.arrays[name].length) for p in layout.programs if name in p.arrays}
        if not len(pes) or len(kinds) != 1:
            names = sorted({array for program in layout.programs for array in program.arrays})
            reason = "has different types or lengths" if len(kinds) > 1 else "is on no PE there"
            raise UserError(f"array {name!r} {reason}; arrays are {', '.join(names) or 'none'}")
        return pes, *kinds.pop()

    def _pieces(self, name: str, pes: np.ndarray):
        for index, program in enumerate(self.layout.programs):
            chosen = self.program_of[pes] == index
            if name in program.arrays and chosen.any():
                rows: np.ndarray | slice = self.row_of[pes[chosen]]
                everywhere = bool(chosen.all())
                if everywhere and len(rows) == len(self.blocks[index]):
                    rows = slice(None)
                yield self.blocks[index], rows, slice(None) if everywhere else chosen, program.arrays[name].base


def check_range(name: str, values: np.ndarray, dtype: Dtype) -> None:
    """Integers that do not fit would wrap round; floats that do not fit become infinite, as on the machine."""
    if dtype not in (Dtype.i32, Dtype.i16) or not values.size:
        return
    limits = np.iinfo(dtype.numpy)
    # NaN is in no range.
    low, high = values.min(), values.max()
    if not (limits.min <= low and high <= limits.max):
        raise UserError(f"array {name!r} of {dtype.name} holds {limits.min} to {limits.max}, got {low} to {high}")


def to_elements(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Host values as the bits that lie in SRAM; bf16 rounds to nearest even."""
    if dtype is not Dtype.bf16:
        return values.astype(dtype.numpy)
    return float_to_bf16(values.astype(np.float32))


def from_elements(bits: np.ndarray, dtype: Dtype) -> np.ndarray:
    return bf16_to_float(bits) if dtype is Dtype.bf16 else bits


def float_to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    # Rounding must not turn a NaN into an infinity.
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
