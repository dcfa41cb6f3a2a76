"""How fast the wafer is simulated, in PE-cycles per second: `python bench/fabric_speed.py [--json FILE] [--quick]`.

A PE-cycle is one cycle of one PE that has a program. Beside our numbers stand the slow reference (every router, every
cycle, in Python) on a small case, the same loop over routers written plainly in C (router_loop.c, one thread), and the
vendor's simulator as its users report it (0.3 to 1.4 M PE-cycles/s in total on five threads). CPU seconds are printed
too: on a shared machine the wall clock says little.

Every case runs in a process of its own, so that the peak of its memory can be set against the SRAM its PEs use; what
the target allows is 1.3 times that and 1 KB per PE.
"""

import argparse
import ctypes
import json
import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openwafer.fabric import EAST, NORTH, RAMP, SOUTH, WEST, Layout, ProgramBuilder, Rect, Simulation
from openwafer.fabric.engine import EngineMachine
from openwafer.fabric.image import Image
from openwafer.fabric.kernels.allreduce import TwoLevel
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.broadcast import BroadcastConfig
from openwafer.fabric.kernels.broadcast import run as run_broadcast
from openwafer.fabric.kernels.gemv import GemvConfig
from openwafer.fabric.kernels.gemv import run as run_gemv
from openwafer.fabric.kernels.matrices import GemmConfig
from openwafer.fabric.kernels.meshgemm import run as run_meshgemm
from openwafer.fabric.kernels.outcome import Outcome, Setting
from openwafer.fabric.kernels.reduce import line_program
from openwafer.fabric.kernels.summa import run as run_summa
from openwafer.fabric.layout import opposite
from openwafer.kernels.compiled import compiled
from openwafer.systems import WSE2, WSE3

VENDOR_PE_CYCLES_S = 1.4e6
MIN_SRAM_BYTES = 64 * 2**20  # below, the interpreter and the host's own arrays are what takes memory
# Direction: where along its axis streams of it begin.
FIRST = {EAST: 0, WEST: 4, SOUTH: 2, NORTH: 6}
Lengths = tuple[tuple[int, int], ...]  # words of each colour
SIGN: dict[int, int] = {EAST: 1, SOUTH: 1, WEST: -1, NORTH: -1}


def mesh_program(pe: ProgramBuilder, *, words: int, sends: Lengths, gets: Lengths) -> None:
    """Send and receive vectors, so many words of each colour, and compute all the while."""
    data, a, c = pe.array("data", words), pe.array("a", words, bank=0), pe.array("c", words, bank=2)
    buffers = {colour: pe.array(f"in{colour}", length) for colour, length in gets}
    factor = pe.register()
    with pe.task("main", start=True):
        for thread, (colour, length) in enumerate(sends):
            pe.mov(pe.send(colour), data[:length], thread=thread)
        for thread, (colour, buffer) in enumerate(buffers.items()):
            pe.mov(buffer, pe.receive(colour), thread=4 + thread)
        with pe.loop(3, overhead=1):  # two elements per cycle: as long as the slowest streams
            pe.mac(c, a, factor)


def busy_mesh(size: int, words: int, distance: int = 8, every: int = 8) -> Layout:
    """Streams in all four directions, `distance` hops long, one from every `every`-th PE of a line.

    8 and 8: every link carries one stream, undisturbed. 2 and 1: every PE sends in all directions, and the streams
    fight for links and ramps. Streams that share a way between core and router are shorter, so that all end together.
    """
    layout = Layout(WSE2, size, size)
    streams: list[tuple[tuple[int, int], tuple[int, int], int]] = []  # from, to, colour
    for direction, first in FIRST.items():
        for start in range(first % every, size, every):
            end = start + SIGN[direction] * distance
            if end not in range(size):
                continue
            # The next stream that touches the same routers needs another colour.
            colour = 3 * direction + start // every % 3
            route_stream(layout, colour, direction, start, end)
            for across in range(size):
                source, target = (start, across), (end, across)
                if direction in (NORTH, SOUTH):
                    source, target = (across, start), (across, end)
                streams.append((source, target, colour))
    num_out, num_in = Counter(stream[0] for stream in streams), Counter(stream[1] for stream in streams)
    sends: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    gets: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for source, target, colour in streams:
        sends[source][colour] = gets[target][colour] = words // max(num_out[source], num_in[target])
    for y in range(size):
        for x in range(size):
            # PEs with equal tuples share their code.
            lengths = {"sends": tuple(sends[x, y].items()), "gets": tuple(gets[x, y].items())}
            layout.place(mesh_program, Rect(x, y), words=words, **lengths)
    return layout


def route_stream(layout: Layout, colour: int, direction: int, start: int, end: int) -> None:
    """One stream in each line across the direction."""
    step = SIGN[direction]
    for index in range(start, end + step, step):
        inputs = RAMP if index == start else opposite(direction)
        outputs = RAMP if index == end else direction
        rect = Rect(index, 0, 1, layout.height) if direction in (EAST, WEST) else Rect(0, index, layout.width, 1)
        layout.route(colour, rect, inputs, outputs)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one case did, apart from how long it took."""

    cycles: int
    num_pes: int
    links: float  # share of link-cycles used
    sram_bytes: int | None = None  # that the programs declare


def num_links(layout: Layout) -> int:
    return 2 * (layout.width * (layout.height - 1) + layout.height * (layout.width - 1))


def run_layout(layout: Layout, num_threads: int | None) -> Run:
    image = Image(layout)
    machine = EngineMachine(image, num_threads=num_threads)
    cycles = machine.run(2**31 - 2)
    share = machine.status[6] / (cycles * num_links(layout))
    return Run(cycles=cycles, num_pes=image.program_of.size, links=float(share), sram_bytes=image.memory.nbytes)


def run_router_loop(layout: Layout, words: int) -> Run:
    """The streams of a layout without its cores, through router_loop.c."""
    loop = compiled("router_loop", [Path(__file__).with_name("router_loop.c")]).router_loop
    loop.restype = ctypes.c_int64
    num_colours = 1 + max(layout.route_of)
    outputs = np.zeros((layout.height, layout.width, num_colours), np.uint8)
    to_send = np.zeros(outputs.shape, np.int32)
    table = np.array([route.outputs[0] for route in layout.routes] + [0], np.uint8)  # the last is read for no route
    sends = [set(program.outputs) for program in layout.programs] + [set()]
    for colour, route_of in layout.route_of.items():
        outputs[:, :, colour] = table[route_of]
        to_send[:, :, colour] = words * np.array([colour in colours for colours in sends])[layout.program_of]
    results, total = np.zeros(3, np.int64), int(to_send.sum())
    cycles = loop(
        layout.width, layout.height, num_colours, ctypes.c_void_p(outputs.ctypes.data),
        ctypes.c_void_p(to_send.ctypes.data), ctypes.c_void_p(results.ctypes.data),
    )  # fmt: skip
    assert results[1] == total, "words were lost"
    return Run(cycles=cycles, num_pes=layout.width * layout.height, links=results[0] / (cycles * num_links(layout)))


def all_reduce(width: int, height: int, words: int) -> Layout:
    """An all-reduce along every row of the fabric."""
    layout = Layout(WSE2, width, height)
    axis, collective = Axis(layout, "x"), TwoLevel(width, 15)
    collective.route(axis)
    for index in range(width):
        layout.place(line_program, axis.rect(index), collective=collective, index=index, words=words)
    return layout


def memory_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (at most) of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: this needs Linux")


def in_child(work: Callable[[], Run], results: "multiprocessing.Queue[tuple]") -> None:
    before = memory_bytes("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    run = work()
    results.put((run, time.perf_counter() - start, time.process_time() - cpu, memory_bytes("VmHWM") - before))


def in_child_alone(work: Callable[[], Run]) -> tuple[Run, float, float, int]:
    """The run, its seconds of wall clock and CPU, and the most memory it held."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=in_child, args=(work, results))
    child.start()
    outcome = results.get()
    child.join()
    return outcome


def measure(name: str, work: Callable[[], Run]) -> dict[str, object]:
    run, wall_s, cpu_s, peak_bytes = in_child_alone(work)
    rate = run.cycles * run.num_pes / wall_s
    line = (
        f"{name:40} {run.cycles:>9,} cycles x {run.num_pes:>7,} PEs, links {run.links:5.1%}: {wall_s:7.2f} s "
        f"({cpu_s:.2f} CPU s), {rate / 1e6:8.1f} M PE-cycles/s ({rate * wall_s / cpu_s / 1e6:.1f} per CPU s), "
        f"{rate / VENDOR_PE_CYCLES_S:,.0f} x the vendor's"
    )
    row: dict[str, object] = {
        "name": name, "cycles": run.cycles, "num_pes": run.num_pes, "link_utilisation": run.links, "wall_s": wall_s,
        "cpu_s": cpu_s, "pe_cycles_per_s": rate, "pe_cycles_per_cpu_s": rate * wall_s / cpu_s,
    }  # fmt: skip
    if run.sram_bytes is not None and run.sram_bytes >= MIN_SRAM_BYTES:
        ratio, allowed = peak_bytes / run.sram_bytes, 1.3 + 1024 * run.num_pes / run.sram_bytes
        line += f", memory {ratio:.2f} x the SRAM in use (at most {allowed:.2f})"
        row |= {"sram_bytes": run.sram_bytes, "peak_bytes": peak_bytes, "allowed_ratio": allowed}
    print(line, flush=True)
    return row


def reference_case() -> Run:
    report = Simulation(busy_mesh(12, 64), engine="reference").run()
    return Run(cycles=report.cycles, num_pes=report.num_pes, links=report.link_utilisation)


def kernel(outcome: Outcome) -> Run:
    report, memory = outcome.report, outcome.simulation.image.memory
    assert outcome.is_right, "wrong values"
    return Run(
        cycles=report.cycles, num_pes=report.num_pes, links=report.link_utilisation, sram_bytes=memory.nbytes
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--quick", action="store_true", help="leave out the cases over the whole fabric")
    args = parser.parse_args()
    Simulation(busy_mesh(10, 8)).run()  # compile both before anything is timed
    run_router_loop(busy_mesh(10, 8), 8)
    small, busy = busy_mesh(64, 1024), busy_mesh(320, 2048)
    fighting = busy_mesh(60, 1024, distance=2, every=1)
    gemm = GemmConfig(algorithm="mesh")
    in_child_alone(lambda: run_layout(busy, 1))  # the first to use so much memory waits for the system to find it
    cases: list[tuple[str, Callable[[], Run]]] = [
        ("busy mesh 320 x 320, 1 thread", lambda: run_layout(busy, 1)),
        ("busy mesh 320 x 320, 2 threads", lambda: run_layout(busy, 2)),
        ("reference in Python, busy mesh 12 x 12", reference_case),
        ("router loop in C, busy mesh 64 x 64", lambda: run_router_loop(small, 1024)),
        ("router loop in C, contended mesh 60 x 60", lambda: run_router_loop(fighting, 1024)),
        ("busy mesh 64 x 64, 1 thread", lambda: run_layout(small, 1)),
        ("contended mesh 60 x 60, 1 thread", lambda: run_layout(fighting, 1)),
        ("MeshGEMM 480^3 on 60 x 60", lambda: kernel(run_meshgemm(gemm, WSE3, Setting()))),
        ("SUMMA 720^3 on 120 x 120", lambda: kernel(run_summa(GemmConfig(grid=120, size=720), WSE3, Setting()))),
    ]
    if not args.quick:
        gemv, whole = GemvConfig(grid=600, size=16800), BroadcastConfig(width=750, height=994, words=1024)
        cases += [
            ("GEMV 16,800^2 on 600 x 600", lambda: kernel(run_gemv(gemv, WSE3, Setting()))),
            ("broadcast of 1024 words, 750 x 994", lambda: kernel(run_broadcast(whole, WSE2, Setting()))),
            ("all-reduce of 1024 words, 750 x 994", lambda: run_layout(all_reduce(750, 994, 1024), None)),
        ]
    rows = []
    for name, work in cases:
        rows.append(measure(name, work))
        if args.json:
            args.json.write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
