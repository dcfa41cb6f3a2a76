"""One core of the slow reference machine: its main thread, its microthreads, its tasks.

Memory rules (they make every race well defined): instructions over memory read and write when they are issued;
fabric instructions read their memory operands when issued and write memory or registers when they complete.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from openwafer.fabric import arithmetic
from openwafer.fabric.cost import scalar_cycles, tile_cycles, vector_cycles
from openwafer.fabric.fault import Fault
from openwafer.fabric.image import Image
from openwafer.fabric.isa import MAX_LENGTH, NONE, REDUCING_OPS, SLOW_SCALAR_OPS, VECTOR_OPS, Dtype, Field, Kind, Op

MAIN = 8  # the thread number of instructions that the main thread waits for


class Trap(Exception):
    """An architecture error inside a core; the machine adds where and when."""

    def __init__(self, fault: Fault, detail: int) -> None:
        self.fault, self.detail = fault, detail


@dataclass
class Operation:
    """A fabric instruction that is running: it moves one word per cycle when it can."""

    thread: int
    row: np.ndarray
    start: int
    source: int | None  # colour it reads
    target: int | None  # colour it writes
    remaining: int  # words
    length: int  # elements
    operand: np.ndarray | None  # memory or register operand, as elements, read at issue
    words: list[int] = field(default_factory=list)  # to send, or received so far
    taken: int = 0
    control: bool = False
    done_at: int | None = None
    waits_since: int | None = None
    waits_for: str = ""


class Core:
    """State of one PE. The machine calls `step` once per cycle after the routers have moved."""

    def __init__(self, image: Image, pe: int) -> None:
        self.image, self.pe = image, pe
        self.wafer = image.layout.wafer
        self.program = image.layout.programs[image.program_of[pe]]
        self.memory = image.blocks[image.program_of[pe]][image.row_of[pe]]
        self.registers = image.registers[pe]
        self.threads: dict[int, Operation] = {}
        self.activated = {i for i, task in enumerate(self.program.tasks) if task.start}
        self.blocked: set[int] = set()
        self.ready_at: int | None = 0  # when the main thread does its next thing; None while it waits
        self.pc: int | None = None  # None: idle
        self.waits_for: int | None = None  # thread
        self.busy_cycles = 0
        self.last_event = 0

    # -- one cycle ---------------------------------------------------------------------------------------

    def step(self, t: int, queues: "Queues") -> bool:
        """Complete what is done, then run the main thread; whether anything happened."""
        active = False
        for thread in sorted(self.threads):
            operation = self.threads[thread]
            if operation.done_at == t:
                del self.threads[thread]
                self._complete(operation)
                self.last_event, active = t, True
                if thread == MAIN:
                    self.ready_at = t
                if thread == self.waits_for:
                    self.waits_for = None
                    self._busy(t, self.wafer.costs.task_start)
        if self.pc is None and self.ready_at is None and self._choose(t, queues, probe=True) is not None:
            self.ready_at = t
        while self.ready_at == t:
            active = self._advance(t, queues) or active
        return active

    def _advance(self, t: int, queues: "Queues") -> bool:
        if self.pc is None:
            task = self._choose(t, queues)
            if task is None:
                self.ready_at = None
                return False
            self.pc = self.program.tasks[task].entry
            self._busy(t, self.wafer.costs.task_start)
        else:
            self._execute(self.program.code[self.pc], t, queues)
        self.last_event = t
        return True

    def _choose(self, t: int, queues: "Queues", probe: bool = False) -> int | None:
        for index, task in enumerate(self.program.tasks):
            if index in self.blocked:
                continue
            if task.colour is not None and queues.head(self.pe, task.colour, t) and not self._reads(task.colour):
                if not probe:
                    self.registers[task.word] = arithmetic.wrap(queues.pop(self.pe, task.colour))
                return index
            if index in self.activated:
                if not probe:
                    self.activated.discard(index)
                return index
        return None

    def _reads(self, colour: int) -> bool:
        return any(operation.source == colour for operation in self.threads.values())

    def _busy(self, t: int, cycles: int) -> None:
        self.ready_at = t + cycles
        self.busy_cycles += cycles

    # -- instructions ------------------------------------------------------------------------------------

    def _execute(self, row: np.ndarray, t: int, queues: "Queues") -> None:
        op = Op(row[Field.OP])
        kinds = (row[Field.DST], row[Field.A], row[Field.B])
        if op is Op.END:
            self.pc = None
            self.ready_at = t
            return
        assert self.pc is not None
        self.pc += 1
        if Kind.FABRIC in kinds:
            self._issue(row, t)
        elif op in VECTOR_OPS:
            self._busy(t, self._vector(row))
        elif op is Op.TILE:
            self._busy(t, self._tile(row))
        elif op is Op.WAIT and int(row[Field.IMM]) in self.threads:
            self.waits_for, self.ready_at = int(row[Field.IMM]), None
        elif op is Op.WAIT:
            self._busy(t, self.wafer.costs.task_start)
        elif op is Op.ADVANCE:
            queues.advance(self.pe, int(row[Field.IMM]))
            self._busy(t, self.wafer.costs.scalar)
        else:
            self._scalar(op, row)
            self._busy(t, scalar_cycles(self.wafer, op, int(row[Field.IMM])))

    def _length(self, row: np.ndarray) -> int:
        register = row[Field.LENGTH_REG]
        return int(row[Field.LENGTH]) if register == NONE else max(0, int(self.registers[register]))

    def _check_length(self, row: np.ndarray, length: int) -> None:
        if length > MAX_LENGTH:
            raise Trap(Fault.OUT_OF_BOUNDS, self._index(row))

    def _address(self, row: np.ndarray, at: Field) -> int:
        register = row[at + 2]
        return int(row[at + 1]) + (0 if register == NONE else int(self.registers[register]))

    def _view(self, row: np.ndarray, at: Field, length: int, dtype: Dtype) -> np.ndarray:
        """Byte indices of a memory operand, [length, bytes per element]."""
        size, stride = dtype.num_bytes, int(row[at + 3])
        first = self._address(row, at)
        self._check_length(row, length)  # of a tile's operands too
        indices = first + size * stride * np.arange(length)[:, None] + np.arange(size)
        bad_alignment = first % size != 0
        if length and (bad_alignment or indices.min() < 0 or indices.max() >= self.program.memory_bytes):
            raise Trap(Fault.OUT_OF_BOUNDS, self._index(row))
        return indices

    def _index(self, row: np.ndarray) -> int:
        return (row.__array_interface__["data"][0] - self.program.code.__array_interface__["data"][0]) // row.nbytes

    def _operand(self, row: np.ndarray, at: Field, length: int, dtype: Dtype) -> np.ndarray | None:
        if row[at] == Kind.MEM:
            return arithmetic.unpack(self.memory[self._view(row, at, length, dtype)].reshape(-1), dtype)
        if row[at] == Kind.REG:
            return np.broadcast_to(arithmetic.scalar_value(self.registers[row[at + 1]], dtype), (length,))
        return None

    def _store(self, row: np.ndarray, values: np.ndarray, length: int, dtype: Dtype) -> None:
        elements = arithmetic.pack(values, dtype)
        view = self._view(row, Field.DST, length, dtype)
        self.memory[view] = np.ascontiguousarray(elements).view(np.uint8).reshape(view.shape)

    def _vector(self, row: np.ndarray) -> int:
        op, dtype, length = Op(row[Field.OP]), Dtype(row[Field.DTYPE]), self._length(row)
        self._check_length(row, length)
        a = self._operand(row, Field.A, length, dtype)
        b = self._operand(row, Field.B, length, dtype)
        assert a is not None
        self._finish(row, op, dtype, length, a, b)
        sources = [(self._address(row, at), int(row[at + 3])) for at in (Field.A, Field.B) if row[at] == Kind.MEM]
        in_memory = row[Field.DST] == Kind.MEM
        dst = (self._address(row, Field.DST), int(row[Field.DST + 3])) if in_memory else None
        return vector_cycles(self.wafer, op, dtype, length, sources, dst)

    def _finish(self, row: np.ndarray, op: Op, dtype: Dtype, length: int, a: np.ndarray, b: np.ndarray | None) -> None:
        """Compute and write to memory or to a register."""
        if row[Field.DST] == Kind.REG:
            register = row[Field.DST + 1]
            if op in REDUCING_OPS:
                start = arithmetic.bits_float(int(self.registers[register]))
                self.registers[register] = arithmetic.float_bits(float(arithmetic.reduce(op, start, a, b)))
            elif length:  # the last value stays
                last = arithmetic.compute(op, a[-1:], None if b is None else b[-1:], None)
                self.registers[register] = last.view(np.int32)[0]
            return
        out = Dtype(row[Field.IMM]) if op is Op.CONVERT else dtype
        old = self._operand(row, Field.DST, length, dtype) if op is Op.MAC else None
        self._store(row, arithmetic.compute(op, a, b, old), length, out)

    def _tile(self, row: np.ndarray) -> int:
        dtype = Dtype(row[Field.DTYPE])
        m, n, k = int(row[Field.LENGTH]), int(row[Field.N]), int(row[Field.K])
        a = self._operand(row, Field.A, m * k, dtype)
        b = self._operand(row, Field.B, k * n, dtype)
        c = self._operand(row, Field.DST, m * n, dtype)
        assert a is not None
        assert b is not None
        assert c is not None
        a, b, c = a.reshape(k, m), b.reshape(n, k), c.reshape(n, m).copy()
        for step in range(k):
            for column in range(n):
                values = arithmetic.compute(Op.MAC, a[step], b[column, step : step + 1], c[column])
                c[column] = arithmetic.unpack(arithmetic.pack(values, dtype), dtype)
        self._store(row, c.reshape(-1), m * n, dtype)
        return tile_cycles(self.wafer, dtype, m, n, k, outer_n=bool(row[Field.IMM]))

    def _scalar(self, op: Op, row: np.ndarray) -> None:
        registers, imm = self.registers, int(row[Field.IMM])
        dst, a = row[Field.DST + 1], row[Field.A + 1]
        if op is Op.SET:
            registers[dst] = imm
        elif op in (Op.IADD, Op.IMUL, Op.ILT, Op.IEQ):
            x, y = int(registers[a]), int(registers[row[Field.B + 1]]) if row[Field.B] == Kind.REG else imm
            value = {Op.IADD: x + y, Op.IMUL: x * y, Op.ILT: int(x < y), Op.IEQ: int(x == y)}[op]
            registers[dst] = arithmetic.wrap(value)
        elif op in (Op.FADD, Op.FMUL, Op.FMAX):
            x, y = (arithmetic.bits_float(int(registers[i])).reshape(1) for i in (a, row[Field.B + 1]))
            vector = {Op.FADD: Op.ADD, Op.FMUL: Op.MUL, Op.FMAX: Op.MAX}[op]
            registers[dst] = arithmetic.compute(vector, x, y, None).view(np.int32)[0]
        elif op in SLOW_SCALAR_OPS:
            x = arithmetic.bits_float(int(registers[a])).reshape(1)
            vector = {Op.FEXP: Op.EXP, Op.FRSQRT: Op.RSQRT, Op.FRECIP: Op.RECIP}[op]
            registers[dst] = arithmetic.compute(vector, x, None, None).view(np.int32)[0]
        elif op is Op.LOAD:
            value = self._operand(row, Field.A, 1, Dtype(row[Field.DTYPE]))
            assert value is not None
            registers[dst] = value.view(np.int32)[0]
        elif op is Op.STORE:
            dtype = Dtype(row[Field.DTYPE])
            self._store(row, arithmetic.scalar_value(registers[a], dtype), 1, dtype)
        elif op is Op.UNPACK:
            word = int(registers[a]) & 0xFFFFFFFF
            registers[dst] = word >> 16
            half = np.array([word & 0xFFFF], np.uint16).view(np.float16).astype(np.float32)
            registers[row[Field.B + 1]] = half.view(np.int32)[0]
        else:
            self._flow(op, row)

    def _flow(self, op: Op, row: np.ndarray) -> None:
        registers, dst = self.registers, row[Field.DST + 1]
        if op is Op.LOOP:
            registers[dst] = 0
            if self._length(row) <= 0:
                self.pc = int(row[Field.TARGET]) + 1
        elif op is Op.ENDLOOP:
            registers[dst] += 1
            if registers[dst] < self._length(row):
                self.pc = int(row[Field.TARGET]) + 1
        elif op is Op.BRANCH:
            if registers[row[Field.A + 1]] == 0:
                self.pc = int(row[Field.IMM])
        elif op is Op.ACTIVATE:
            self.activated.add(int(row[Field.IMM]))
        elif op is Op.BLOCK:
            self.blocked.add(int(row[Field.IMM]))
        else:
            assert op is Op.UNBLOCK
            self.blocked.discard(int(row[Field.IMM]))

    # -- fabric instructions -----------------------------------------------------------------------------

    def _issue(self, row: np.ndarray, t: int) -> None:
        dtype, length = Dtype(row[Field.DTYPE]), self._length(row)
        thread = MAIN if row[Field.THREAD] == NONE else int(row[Field.THREAD])
        reads = Field.A if row[Field.A] == Kind.FABRIC else Field.B if row[Field.B] == Kind.FABRIC else None
        source = None if reads is None else int(row[reads + 1])
        target = int(row[Field.DST + 1]) if row[Field.DST] == Kind.FABRIC else None
        if thread in self.threads:
            raise Trap(Fault.THREAD_BUSY, thread)
        for other in self.threads.values():
            if source is not None and other.source == source:
                raise Trap(Fault.QUEUE_BUSY, source)
            if target is not None and other.target == target:
                raise Trap(Fault.QUEUE_BUSY, target)
        self._check_length(row, length)
        cycles = self.wafer.costs.fabric_startup
        operation = Operation(thread, row, t + cycles, source, target, length, length, None)
        self._prepare(operation, Op(row[Field.OP]), dtype, reads)
        if operation.remaining == 0:
            operation.done_at = operation.start
        self.threads[thread] = operation
        self._busy(t, cycles)
        if thread == MAIN:
            self.ready_at = None

    def _prepare(self, operation: Operation, op: Op, dtype: Dtype, reads: Field | None) -> None:
        """Read the operands in memory; for a send, compute all its words."""
        row, length = operation.row, operation.length
        if op is Op.CONTROL:
            operation.words, operation.control = [0], True
        elif reads is None:
            a = self._operand(row, Field.A, length, dtype)
            b = self._operand(row, Field.B, length, dtype)
            assert a is not None
            elements = arithmetic.pack(arithmetic.compute(op, a, b, None), dtype)
            if row[Field.SKIP_ZEROS]:
                kept = np.flatnonzero(elements.astype(np.float32) != 0)
                words = (kept.astype(np.uint32) << 16) | elements[kept].view(np.uint16)
                operation.remaining = len(kept)
            else:
                words = arithmetic.to_words(elements)
            operation.words = [int(word) for word in words]
        else:
            other = Field.B if reads is Field.A else Field.A
            operation.operand = self._operand(row, other, length, dtype)
            if operation.target is None and row[Field.DST] == Kind.MEM:
                self._view(row, Field.DST, length, dtype)  # out of bounds at issue, not at completion

    def forward(self, operation: Operation, word: int) -> int:
        """The word that a stream-to-stream instruction sends for the next word it reads."""
        row, dtype = operation.row, Dtype(operation.row[Field.DTYPE])
        a = arithmetic.from_words(np.array([word], np.uint32), dtype)
        b = None if operation.operand is None else operation.operand[operation.taken : operation.taken + 1]
        if row[Field.B] == Kind.FABRIC:
            assert b is not None
            a, b = b, a
        operation.taken += 1
        result = arithmetic.pack(arithmetic.compute(Op(row[Field.OP]), a, b, None), dtype)
        return int(arithmetic.to_words(result)[0])

    def _complete(self, operation: Operation) -> None:
        row = operation.row
        if operation.source is not None and operation.target is None:
            dtype, length = Dtype(row[Field.DTYPE]), operation.length
            a = arithmetic.from_words(np.array(operation.words, np.uint32), dtype)
            b = operation.operand
            if row[Field.B] == Kind.FABRIC:
                assert b is not None
                a, b = b, a
            self._finish(row, Op(row[Field.OP]), dtype, length, a, b)
        if row[Field.THEN] != NONE:
            self.activated.add(int(row[Field.THEN]))


class Queues(Protocol):
    """What a core sees of its input queues and its router."""

    def head(self, pe: int, colour: int, t: int) -> bool:
        """Whether a wavelet of this colour can be taken in cycle `t`."""
        ...

    def pop(self, pe: int, colour: int) -> int:
        """Take it."""
        ...

    def advance(self, pe: int, colour: int) -> None:
        """Move the router's switch of this colour on."""
        ...
