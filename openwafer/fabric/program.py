"""Writing a PE's program: a Python function that is called once and builds a list of instructions per task.

    def double(pe):
        x = pe.array("x", 8)
        with pe.task("main", start=True):
            pe.add(x, x, x)

PEs that run the same function with the same arguments share the code; what differs between them goes into
`pe.param` registers and into memory. `isa.py` says what each instruction does.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from openwafer.errors import UserError
from openwafer.fabric.isa import INSTRUCTION_WORDS, NONE, Dtype, Fabric, Field, Mem, Op, Operand, Reg, encode_operand
from openwafer.fabric.signature import (
    check_equal_lengths,
    check_memory,
    check_operand,
    check_options,
    check_scalar,
    check_skip_zeros,
    check_vector,
    register_number,
    whole_number,
)
from openwafer.systems import Wafer

MAX_TASKS = 32
Value = TypeVar("Value")


class OutOfMemory(UserError):
    """The arrays of a program are more than the SRAM of a PE."""


class OutOfQueues(UserError):
    """A program uses more colours than a PE has queues."""


@dataclass
class Task:
    """One task: where its code starts, what activates it. `colour` makes it a data task of that input queue."""

    name: str
    start: bool
    colour: int | None
    word: int  # register that receives the wavelet of a data task
    entry: int = 0


@dataclass
class Program:
    """The finished program of a kind of PE."""

    name: str
    code: np.ndarray  # int32 [num_instructions, INSTRUCTION_WORDS]
    tasks: list[Task]
    arrays: dict[str, Mem]
    params: dict[str, int]  # name -> register
    memory_bytes: int
    inputs: dict[int, int]  # colour -> words its input queue holds
    outputs: dict[int, int]

    @property
    def advances(self) -> set[int]:
        """Colours whose switch it advances itself."""
        return set(self.code[self.code[:, Field.OP] == Op.ADVANCE, Field.IMM].tolist())


@dataclass
class ProgramBuilder:
    """Handed to a program function as `pe`: allocates arrays and registers, collects instructions."""

    wafer: Wafer
    name: str = "program"
    rows: list[list[int]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    arrays: dict[str, Mem] = field(default_factory=dict)
    params: dict[str, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    memory_bytes: int = 0
    num_registers: int = 0
    _then: list[tuple[int, int, str]] = field(default_factory=list)  # instruction, column, task name
    _in_task: bool = False

    # -- resources ---------------------------------------------------------------------------------------

    def array(self, name: str, length: int, dtype: str = "f32", bank: int | None = None) -> Mem:
        """`length` elements of SRAM, 8-byte aligned; `bank` (even) puts its start into that memory bank."""
        if name in self.arrays:
            raise UserError(f"{self.name}: array {name!r} is declared twice: use another name")
        kind, length = parse_dtype(dtype), whole_number(length)
        if length < 1:
            raise UserError(f"{self.name}: array {name!r} must have at least one element, got {length}")
        base = (self.memory_bytes + 7) // 8 * 8
        if bank is not None:
            if bank not in range(0, self.wafer.num_banks, 2):
                raise UserError(f"{self.name}: bank must be even and below {self.wafer.num_banks}, got {bank}")
            while base // self.wafer.bank_bytes % self.wafer.num_banks != bank:
                base += 8
        self.memory_bytes = base + (length * kind.num_bytes + 3) // 4 * 4
        if self.memory_bytes > self.wafer.sram_bytes:
            raise OutOfMemory(
                f"{self.name}: array {name!r} ends at byte {self.memory_bytes}, a PE of {self.wafer.name} has "
                f"{self.wafer.sram_bytes}: use smaller tiles or more PEs"
            )
        self.arrays[name] = Mem(base, length, kind)
        return self.arrays[name]

    def register(self) -> Reg:
        self.num_registers += 1
        if self.num_registers > self.wafer.num_registers:
            raise UserError(f"{self.name}: more than {self.wafer.num_registers} registers: re-use some")
        return Reg(self.num_registers - 1)

    def param(self, name: str) -> Reg:
        """A register that the layout sets for each PE before the start."""
        if name not in self.params:
            self.params[name] = self.register().index
        return Reg(self.params[name])

    def receive(self, colour: int) -> Fabric:
        """The input queue of a colour; queues are given out in order, the longest first."""
        self._bind(self.inputs, colour, self.wafer.input_queue_words, "input")
        return Fabric(colour)

    def send(self, colour: int) -> Fabric:
        """The output queue of a colour."""
        self._bind(self.outputs, colour, self.wafer.output_queue_words, "output")
        return Fabric(colour)

    def _bind(self, queues: dict[int, int], colour: int, sizes: tuple[int, ...], what: str) -> None:
        if colour in queues:
            return
        if colour not in range(self.wafer.num_colours):
            raise UserError(f"{self.name}: colour must be from 0 to {self.wafer.num_colours - 1}, got {colour}")
        if len(queues) == len(sizes):
            raise OutOfQueues(
                f"{self.name}: colour {colour} needs an {what} queue, and a PE of {self.wafer.name} has "
                f"{len(sizes)}: use fewer colours"
            )
        queues[colour] = sizes[len(queues)]

    # -- tasks and loops ---------------------------------------------------------------------------------

    @contextmanager
    def task(
        self, name: str, *, start: bool = False, on: Fabric | None = None, word: Reg | None = None
    ) -> Iterator[None]:
        """The instructions inside run when the task is activated: at the `start`, by name, or by a wavelet.

        A task `on` an input queue is activated by each wavelet there and finds it in the register `word` (by default
        one that nothing else uses).
        Of several ready tasks, the one declared first runs first.
        """
        if len(self.tasks) == MAX_TASKS:
            raise UserError(f"{self.name}: more than {MAX_TASKS} tasks")
        if self._in_task or any(task.name == name for task in self.tasks):
            reason = "is inside another task" if self._in_task else "is declared twice: use another name"
            raise UserError(f"{self.name}: task {name!r} {reason}")
        if on is not None:
            self._check_streams(on, None, None)
            word = self.register() if word is None else word
        register = 0 if word is None else word.index
        self.tasks.append(Task(name, start, None if on is None else on.colour, register, len(self.rows)))
        self._in_task = True
        yield
        self._emit(Op.END)
        self._in_task = False

    @contextmanager
    def loop(self, count: int | Reg, *, overhead: int | None = None) -> Iterator[Reg]:
        """Repeat the body; gives the iteration's number. Each iteration costs `overhead` (scalar-indexed) cycles."""
        count = plain(count)
        if not isinstance(count, int | Reg):
            raise UserError(f"{self.name}: a loop's count is an integer or a register, got {count!r}")
        counter = self.register()
        begin = len(self.rows)
        cycles = self.wafer.costs.loop_inner if overhead is None else overhead
        if cycles < 0:
            raise UserError(f"{self.name}: loop overhead must not be negative, got {cycles}")
        length = 0 if isinstance(count, Reg) else register_number(count)
        self._emit(Op.LOOP, dst=counter, length=length, length_reg=_index(count))
        yield counter
        end = len(self.rows)
        self._emit(Op.ENDLOOP, dst=counter, length=length, length_reg=_index(count), imm=cycles, target=begin)
        self.rows[begin][Field.TARGET] = end

    @contextmanager
    def when(self, flag: Reg) -> Iterator[None]:
        """The body runs if the register is not zero."""
        branch = self._emit(Op.BRANCH, a=flag)
        yield
        self.rows[branch][Field.IMM] = len(self.rows)

    def wait(self, thread: int) -> None:
        """Go on when the asynchronous instruction of `thread` has completed."""
        self._check_thread(thread)
        self._emit(Op.WAIT, imm=thread)

    # -- vector instructions -----------------------------------------------------------------------------

    def vector(
        self,
        op: Op,
        dst: Operand,
        a: Operand,
        b: Operand | None = None,
        *,
        length: int | Reg | None = None,
        dtype: str | None = None,
        thread: int | None = None,
        then: str | None = None,
        skip_zeros: bool = False,
    ) -> None:
        """One vector instruction. With a `thread` (0 to 7) it is asynchronous and must touch the fabric; `then`
        names a task to activate when it is done. Length and type come from the memory operands by default."""
        check_operand(op, "the destination", dst)
        check_operand(op, "the first source", a)
        if b is not None:
            check_operand(op, "the second source", b)
        length = plain(length)
        memory = [operand for operand in (a, b, dst) if isinstance(operand, Mem)]
        if dtype is None and not memory:
            raise UserError(f"{self.name}: {op.name} without memory operand needs dtype=")
        if length is None and not memory:
            raise UserError(f"{self.name}: {op.name} without memory operand needs length=")
        kind = parse_dtype(dtype) if dtype is not None else memory[0].dtype
        size = length if length is not None else memory[0].length
        streams = [o for o in (a, b, dst) if isinstance(o, Fabric)]
        if (thread is not None or then is not None) and not streams:
            raise UserError(f"{self.name}: {op.name} without fabric operand takes neither thread= nor then=")
        if thread is not None:
            self._check_thread(thread)
        check_vector(op, kind, dst, a, b)
        if length is None:
            check_equal_lengths(op, memory)
        check_memory(op, memory, size, kind if dtype is None else None)
        if skip_zeros:
            check_skip_zeros(op, dst, streams, kind)
        self._check_streams(a, b, dst)
        becomes = int(dst.dtype) if op is Op.CONVERT and isinstance(dst, Mem) else 0
        row = self._emit(
            op, dst=dst, a=a, b=b, dtype=kind, length=size if isinstance(size, int) else 0, length_reg=_index(size),
            thread=thread, imm=becomes, skip_zeros=skip_zeros,
        )  # fmt: skip
        if then is not None:
            self._then.append((row, Field.THEN, then))

    def _check_thread(self, thread: int) -> None:
        if thread not in range(self.wafer.num_microthreads):
            raise UserError(f"{self.name}: thread must be from 0 to {self.wafer.num_microthreads - 1}, got {thread}")

    def _check_streams(self, a: Operand | None, b: Operand | None, dst: Operand | None) -> None:
        for operand in (a, b):
            if isinstance(operand, Fabric) and operand.colour not in self.inputs:
                raise UserError(f"{self.name}: colour {operand.colour} is read without pe.receive({operand.colour})")
        if isinstance(dst, Fabric) and dst.colour not in self.outputs:
            raise UserError(f"{self.name}: colour {dst.colour} is written without pe.send({dst.colour})")

    def _named(self, op: Op, dst: Operand, a: Operand, b: Operand | None, options: dict[str, object]) -> None:
        check_options(op, options)
        self.vector(op, dst, a, b, **options)  # pyright: ignore[reportArgumentType]

    def mov(self, dst: Operand, a: Operand, **options: object) -> None:
        self._named(Op.MOV, dst, a, None, options)

    def add(self, dst: Operand, a: Operand, b: Operand, **options: object) -> None:
        self._named(Op.ADD, dst, a, b, options)

    def mul(self, dst: Operand, a: Operand, b: Operand, **options: object) -> None:
        self._named(Op.MUL, dst, a, b, options)

    def max(self, dst: Operand, a: Operand, b: Operand, **options: object) -> None:
        self._named(Op.MAX, dst, a, b, options)

    def mac(self, dst: Operand, a: Operand, b: Operand, **options: object) -> None:
        self._named(Op.MAC, dst, a, b, options)

    def convert(self, dst: Mem, a: Mem) -> None:
        check_operand(Op.CONVERT, "the destination", dst, (Mem,))
        check_operand(Op.CONVERT, "the source", a, (Mem,))
        self.vector(Op.CONVERT, dst, a, dtype=a.dtype.name)

    def tile(self, c: Mem, a: Mem, b: Mem, *, m: int, n: int, k: int, outer_n: bool = False) -> None:
        """c[m, n] += a[m, k] @ b[k, n], all column-major; the outer of its two loops runs over k, or over n."""
        if min(m, n, k) < 1:
            raise UserError(f"{self.name}: tile sizes must be at least 1, got m={m}, n={n}, k={k}")
        for name, operand, size in (("c", c, m * n), ("a", a, m * k), ("b", b, k * n)):
            check_operand(Op.TILE, name, operand, (Mem,))
            if operand.length < size or operand.dtype != c.dtype or operand.stride != 1:
                raise UserError(
                    f"{self.name}: tile operand {name} must have {size} elements of {c.dtype.name} in a row"
                )
        self._emit(Op.TILE, dst=c, a=a, b=b, dtype=c.dtype, length=m, n=n, k=k, imm=int(outer_n))

    def control(self, stream: Fabric) -> None:
        """Send one control wavelet: it advances the switch of its colour in every router it passes."""
        self._check_streams(None, None, stream)
        self._emit(Op.CONTROL, dst=stream, length=1, dtype=Dtype.i32)

    def advance(self, colour: int) -> None:
        """Advance the switch of `colour` in the PE's own router, without a control wavelet. Words that are still on
        their way out through it follow the new position."""
        self._emit(Op.ADVANCE, imm=colour)

    # -- registers and control flow ----------------------------------------------------------------------

    def set(self, register: Reg, value: float) -> None:
        """An integer, or a float as fp32."""
        check_operand(Op.SET, "the destination", register, (Reg,))
        value = plain(value)
        bits = register_number(value) if isinstance(value, int) else struct.unpack("<i", struct.pack("<f", value))[0]
        self._emit(Op.SET, dst=register, imm=bits)

    def scalar(self, op: Op, dst: Reg, a: Reg, b: Reg | int | None = None) -> None:
        """IADD, IMUL, ILT, IEQ (b a register or a number), FADD, FMUL, FMAX, FEXP, FRSQRT, FRECIP."""
        check_operand(op, "the destination", dst, (Reg,))
        check_operand(op, "the first source", a, (Reg,))
        b = plain(b)
        check_scalar(op, b)
        immediate = 0 if b is None or isinstance(b, Reg) else register_number(b)
        self._emit(op, dst=dst, a=a, b=b if isinstance(b, Reg) else None, imm=immediate)

    def unpack(self, index: Reg, value: Reg, word: Reg) -> None:
        """A sparse wavelet (index in the upper half, fp16 value in the lower) into an integer and an fp32 register."""
        self._emit(Op.UNPACK, dst=index, a=word, b=value)

    def load(self, register: Reg, source: Mem) -> None:
        """One element; 16-bit floats arrive as fp32."""
        check_operand(Op.LOAD, "the destination", register, (Reg,))
        check_operand(Op.LOAD, "the source", source, (Mem,))
        self._emit(Op.LOAD, dst=register, a=source, dtype=source.dtype, length=1)

    def store(self, target: Mem, register: Reg) -> None:
        check_operand(Op.STORE, "the destination", target, (Mem,))
        check_operand(Op.STORE, "the source", register, (Reg,))
        self._emit(Op.STORE, dst=target, a=register, dtype=target.dtype, length=1)

    def activate(self, task: str) -> None:
        self._then.append((self._emit(Op.ACTIVATE), Field.IMM, task))

    def block(self, task: str) -> None:
        self._then.append((self._emit(Op.BLOCK), Field.IMM, task))

    def unblock(self, task: str) -> None:
        self._then.append((self._emit(Op.UNBLOCK), Field.IMM, task))

    # -- encoding ----------------------------------------------------------------------------------------

    def _emit(
        self, op: Op, *, dst: Operand | None = None, a: Operand | None = None, b: Operand | None = None,
        dtype: Dtype = Dtype.f32, length: int = 0, length_reg: int = NONE, thread: int | None = None, imm: int = 0,
        n: int = 0, k: int = 0, target: int = 0, skip_zeros: bool = False,
    ) -> int:  # fmt: skip
        if not self._in_task:
            raise UserError(f"{self.name}: {op.name} outside a task: write it inside `with pe.task(...)`")
        row = [int(op), int(dtype), length, length_reg]
        for operand in (dst, a, b):
            row += encode_operand(operand)
        row += [NONE if thread is None else thread, NONE, imm, n, k, target, int(skip_zeros)]
        self.rows.append(row + [0] * (INSTRUCTION_WORDS - len(row)))
        return len(self.rows) - 1

    def build(self) -> Program:
        names = [task.name for task in self.tasks]
        for row, column, name in self._then:
            if name not in names:
                raise UserError(f"{self.name}: no task {name!r}; there are {', '.join(names)}")
            self.rows[row][column] = names.index(name)
        code = np.array(self.rows, np.int32).reshape(-1, INSTRUCTION_WORDS)
        return Program(
            self.name, code, self.tasks, self.arrays, self.params, self.memory_bytes, self.inputs, self.outputs
        )


def parse_dtype(name: str) -> Dtype:
    if name not in Dtype.__members__:
        raise UserError(f"element type must be one of {', '.join(Dtype.__members__)}, got {name!r}")
    return Dtype[name]


def plain(value: Value) -> Value | int:
    """NumPy's integers as Python's."""
    return int(value) if isinstance(value, np.integer) else value


def _index(value: int | Reg | None) -> int:
    return value.index if isinstance(value, Reg) else NONE
