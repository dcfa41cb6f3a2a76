"""The fast machine: an image handed to the C engine (csrc/), and what it reports back."""

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from openwafer.fabric import toolchain
from openwafer.fabric.fault import Fault, Stuck, locate
from openwafer.fabric.image import Image
from openwafer.fabric.isa import Field, Op
from openwafer.fabric.program import Program

_pointer = ctypes.c_void_p
PES_FOR_TWO_THREADS = 3000
MAX_SPANS = 500_000  # of a trace, some 80 bytes of JSON each: a large GEMM has a billion
STEP_S = 0.25  # how long C runs before Python sees Ctrl-C and shows progress, about


class _Program(ctypes.Structure):
    _fields_ = (
        ("code", _pointer),
        ("num_instructions", ctypes.c_int32),
        ("num_tasks", ctypes.c_int32),
        ("memory_bytes", ctypes.c_int32),
        ("tasks", _pointer),
        ("input_words", _pointer),
        ("output_words", _pointer),
        ("next_tile", _pointer),
    )


class _Route(ctypes.Structure):
    _fields_ = (
        ("num_positions", ctypes.c_uint16),
        ("ring", ctypes.c_uint16),
        ("inputs", ctypes.c_uint8 * 4),
        ("outputs", ctypes.c_uint8 * 4),
    )


@cache
def library() -> Any:
    """The compiled engine with its signatures; raises `toolchain.NoCompiler`."""
    engine = toolchain.load()
    i32, i64 = ctypes.c_int32, ctypes.c_int64
    engine.engine_new.restype = _pointer
    engine.engine_new.argtypes = [i32, i32, *[_pointer] * 6, i32, i64, _pointer, _pointer, i32, i32, i32]
    engine.engine_run.argtypes = [_pointer, i32]
    engine.engine_free.argtypes = [_pointer]
    engine.engine_status.argtypes = [_pointer, _pointer]
    engine.engine_per_pe.argtypes = [_pointer, _pointer, _pointer]
    engine.engine_spans.argtypes = [_pointer, _pointer]
    return engine


def _suitable_threads(num_pes: int) -> int:
    """Two threads meet a few times in every simulated cycle: worth it from some thousand PEs on, on idle cores.

    On cores that others use, one thread waits for the other to be scheduled again: measured 3 times slower than one.
    """
    idle = (os.cpu_count() or 1) - os.getloadavg()[0]
    return 2 if num_pes >= PES_FOR_TWO_THREADS and idle >= 1 else 1


def _next_tile(code: np.ndarray) -> np.ndarray:
    """For each instruction the index of the next TILE from there on, or -1."""
    next_tile, last = np.full(len(code) + 1, -1, np.int32), -1
    for index in reversed(range(len(code))):
        last = index if code[index, Field.OP] == Op.TILE else last
        next_tile[index] = last
    return next_tile


class EngineMachine:
    """Runs an image in C. The image's memory and registers are worked on in place."""

    def __init__(self, image: Image, *, trace: bool = False, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = _suitable_threads(image.program_of.size)
        if any((program.code[:, Field.OP] == Op.ADVANCE).any() for program in image.layout.programs):
            num_threads = 1  # a core that turns its own switch may wake a router of the other band
        self.num_threads = num_threads
        self.image, self.layout, self.trace = image, image.layout, trace
        self._keep: list[Any] = []  # arrays that C points into
        num_pes = image.program_of.size
        self.busy = np.zeros(num_pes, np.int64)  # cycles the main thread of each PE worked
        self.hops = np.zeros(num_pes, np.int64)  # words each router forwarded
        self.spans = np.zeros((0, 4), np.int32)  # PE, task or 100 + thread, start, end
        self.status = np.zeros(17, np.int64)  # see engine_status in csrc/engine.c

    @property
    def is_cut(self) -> bool:
        """Whether the trace has not all of the run."""
        return bool(self.status[12])

    def _max_spans(self) -> int:
        """Of each thread."""
        return MAX_SPANS // self.num_threads if self.trace else 0

    def run(self, max_cycles: int, progress: Callable[[int], None] | None = None) -> int:
        """Run to the end; returns the cycle of the last event in any core. `progress` is told cycles now and then."""
        engine = library()
        handle = self._new(engine, max_cycles)
        try:
            until = step = 64
            began = time.perf_counter()
            while engine.engine_run(handle, until):
                took, began = time.perf_counter() - began, time.perf_counter()
                if progress is not None:
                    progress(until)
                # Cycles take what happens in them: nanoseconds, or a second on a whole wafer.
                step = max(1, step // 2) if took > 2 * STEP_S else step * 2 if took < STEP_S else step
                until = min(until + step, 2**31 - 2)
            engine.engine_status(handle, self.status.ctypes.data)
            engine.engine_per_pe(handle, self.busy.ctypes.data, self.hops.ctypes.data)
            self.spans = np.zeros((int(self.status[11]), 4), np.int32)
            engine.engine_spans(handle, self.spans.ctypes.data)
        finally:
            engine.engine_free(handle)
        fault, pe, cycle, detail = (int(value) for value in self.status[:4])
        if fault:
            raise locate(self.image, Fault(fault), pe, cycle, detail, self._stuck())
        return int(self.status[10])

    def _stuck(self) -> Stuck | None:
        """Of a deadlock."""
        lacks_words, num_words, num_others, other = (int(value) for value in self.status[13:])
        if not num_words:
            return None
        first = other if num_others else None
        return Stuck(lacks_words=bool(lacks_words), num_words=num_words, num_others=num_others, other=first)

    def _new(self, engine: Any, max_cycles: int) -> int:
        image, layout = self.image, self.layout
        programs = (_Program * max(1, len(layout.programs)))(*[self._program(p) for p in layout.programs])
        routes = (_Route * max(1, len(layout.routes)))()
        for index, route in enumerate(layout.routes):
            routes[index].num_positions = len(route.inputs)
            routes[index].ring = int(route.ring)
            routes[index].inputs[: len(route.inputs)] = route.inputs
            routes[index].outputs[: len(route.outputs)] = route.outputs
        num_colours = layout.wafer.num_colours
        route_of = np.full((num_colours, image.program_of.size), -1, np.int16)
        for colour, table in layout.route_of.items():
            route_of[colour] = table.ravel()
        costs = self._costs()
        self._keep += [programs, routes, route_of, costs]
        handle = engine.engine_new(
            layout.width, layout.height, costs.ctypes.data, ctypes.addressof(programs), ctypes.addressof(routes),
            image.program_of.ctypes.data, image.memory_offset.ctypes.data, route_of.ctypes.data, num_colours,
            self._num_nodes(route_of), image.memory.ctypes.data, image.registers.ctypes.data,
            min(max_cycles, 2**31 - 2), self._max_spans(), self.num_threads,
        )  # fmt: skip
        if not handle:
            raise MemoryError(f"no memory for {layout.width} x {layout.height} PEs")
        return handle

    def _num_nodes(self, route_of: np.ndarray) -> int:
        queues = np.array([len(p.inputs) + len(p.outputs) for p in self.layout.programs] + [0])
        return int((route_of >= 0).sum() + queues[self.image.program_of].sum())

    def _costs(self) -> np.ndarray:
        """In the order of `Costs` in engine.h."""
        wafer, c = self.layout.wafer, self.layout.wafer.costs
        write_buffer = -1 if c.write_buffer_16 is None else c.write_buffer_16
        values = [
            c.vector_startup, c.vector_minimum, c.vector_overlap, c.group_cycles_16, c.simd_16, write_buffer,
            c.fabric_startup, c.task_start, c.scalar, c.divide, wafer.ramp_cycles, wafer.router_queue_words,
            wafer.num_banks, wafer.bank_bytes, wafer.num_registers, c.loop_inner, c.loop_outer, wafer.hop_cycles,
            c.forward_latency,
        ]  # fmt: skip
        return np.array(values, np.int32)

    def _program(self, program: Program) -> _Program:
        rows = [(t.entry, -1 if t.colour is None else t.colour, t.word, int(t.start)) for t in program.tasks]
        tasks = np.array(rows, np.int32).reshape(-1, 4)
        queues = np.zeros((2, self.layout.wafer.num_colours), np.int32)
        for index, words in enumerate((program.inputs, program.outputs)):
            for colour, size in words.items():
                queues[index, colour] = size
        next_tile = _next_tile(program.code)
        self._keep += [program.code, tasks, queues, next_tile]
        return _Program(
            program.code.ctypes.data, len(program.code), len(tasks), program.memory_bytes, tasks.ctypes.data,
            queues[0].ctypes.data, queues[1].ctypes.data, next_tile.ctypes.data,
        )  # fmt: skip
