"""How fast the wafer is simulated, in PE-cycles per second: `python bench/fabric_speed.py [--json FILE] [--quick]`.

A PE-cycle is one cycle of one PE that has a program. Beside our numbers stand the slow reference (every router, every
cycle, in Python) on a small case, and the vendor's simulator as its users report it (0.3 to 1.4 M PE-cycles/s in total
on five threads). CPU seconds are printed too: on a shared machine the wall clock says little.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
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
from openwafer.fabric.kernels.outcome import Setting
from openwafer.fabric.kernels.reduce import line_program
from openwafer.fabric.layout import opposite
from openwafer.systems import WSE2, WSE3

VENDOR_PE_CYCLES_S = 1.4e6
# Direction: where along its axis streams of it begin.
FIRST = {EAST: 0, WEST: 4, SOUTH: 2, NORTH: 6}
SIGN = {EAST: 1, SOUTH: 1, WEST: -1, NORTH: -1}


def mesh_program(pe: ProgramBuilder, *, words: int, sends: tuple[int, ...], gets: tuple[int, ...]) -> None:
    """Send and receive long vectors and compute all the while."""
    data, a, c = pe.array("data", words), pe.array("a", words, bank=0), pe.array("c", words, bank=0)
    buffers = [pe.array(f"in{colour}", words) for colour in gets]
    factor = pe.register()
    with pe.task("main", start=True):
        for thread, colour in enumerate(sends):
            pe.mov(pe.send(colour), data, thread=thread)
        for thread, (colour, buffer) in enumerate(zip(gets, buffers, strict=True)):
            pe.mov(buffer, pe.receive(colour), thread=4 + thread)
        with pe.loop(max(1, len(sends)), overhead=1):
            pe.mac(c, a, factor)


def busy_mesh(size: int, words: int, distance: int = 8, every: int = 8) -> Layout:
    """Streams in all four directions, `distance` hops long, one from every `every`-th PE of a line.

    8 and 8: every link carries one stream, undisturbed. 2 and 1: every PE sends in all directions, and the streams
    fight for links and ramps.
    """
    layout = Layout(WSE2, size, size)
    sends: dict[tuple[int, int], set[int]] = {}
    gets: dict[tuple[int, int], set[int]] = {}
    for direction, first in FIRST.items():
        for start in range(first % every, size, every):
            end = start + SIGN[direction] * distance
            if end not in range(size):
                continue
            # The next stream that touches the same routers needs another colour.
            colour = 3 * direction + start // every % 3
            route_stream(layout, colour, direction, start, end)
            for across in range(size):
                horizontal = direction in (EAST, WEST)
                sends.setdefault((start, across) if horizontal else (across, start), set()).add(colour)
                gets.setdefault((end, across) if horizontal else (across, end), set()).add(colour)
    for y in range(size):
        for x in range(size):
            mine = {"sends": tuple(sorted(sends.get((x, y), ()))), "gets": tuple(sorted(gets.get((x, y), ())))}
            layout.place(mesh_program, Rect(x, y), words=words, **mine)
    return layout


def route_stream(layout: Layout, colour: int, direction: int, start: int, end: int) -> None:
    """One stream in each line across the direction."""
    step = SIGN[direction]
    for index in range(start, end + step, step):
        inputs = RAMP if index == start else opposite(direction)
        outputs = RAMP if index == end else direction
        rect = Rect(index, 0, 1, layout.height) if direction in (EAST, WEST) else Rect(0, index, layout.width, 1)
        layout.route(colour, rect, inputs, outputs)


def run_layout(layout: Layout, num_threads: int | None) -> tuple[int, int, float]:
    """Cycles, PEs, share of link-cycles used."""
    machine = EngineMachine(Image(layout), num_threads=num_threads)
    cycles = machine.run(2**31 - 2)
    links = 2 * (layout.width * (layout.height - 1) + layout.height * (layout.width - 1))
    return cycles, layout.width * layout.height, machine.status[6] / (cycles * links)


def all_reduce(width: int, height: int, words: int) -> Layout:
    """An all-reduce along every row of the fabric."""
    layout = Layout(WSE2, width, height)
    axis, collective = Axis(layout, "x"), TwoLevel(width, 15)
    collective.route(axis)
    for index in range(width):
        layout.place(line_program, axis.rect(index), collective=collective, index=index, words=words)
    return layout


def measure(name: str, work: Callable[[], tuple[int, int, float]]) -> dict[str, object]:
    start, cpu = time.perf_counter(), time.process_time()
    cycles, num_pes, links = work()
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    rate = cycles * num_pes / wall_s
    print(
        f"{name:40} {cycles:>9,} cycles x {num_pes:>7,} PEs, links {links:5.1%}: {wall_s:7.2f} s ({cpu_s:.2f} CPU s), "
        f"{rate / 1e6:8.1f} M PE-cycles/s ({rate * wall_s / cpu_s / 1e6:.1f} per CPU s), "
        f"{rate / VENDOR_PE_CYCLES_S:,.0f} x the vendor's",
        flush=True,
    )
    return {
        "name": name, "cycles": cycles, "num_pes": num_pes, "link_utilisation": links, "wall_s": wall_s,
        "cpu_s": cpu_s, "pe_cycles_per_s": rate, "pe_cycles_per_cpu_s": cycles * num_pes / cpu_s,
    }  # fmt: skip


def reference_case() -> tuple[int, int, float]:
    report = Simulation(busy_mesh(12, 64), engine="reference").run()
    return report.cycles, report.num_pes, report.link_utilisation


def kernel(run: Callable, config: object, wafer: object) -> tuple[int, int, float]:
    report = run(config, wafer, Setting()).report
    return report.cycles, report.num_pes, report.link_utilisation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--quick", action="store_true", help="leave out the cases over the whole fabric")
    args = parser.parse_args()
    Simulation(busy_mesh(10, 8)).run()  # compile the engine before anything is timed
    layout, fighting = busy_mesh(320, 2048), busy_mesh(60, 1024, distance=2, every=1)
    run_layout(layout, 1)  # the first run also pays for getting memory from the system
    rows = [
        measure("reference in Python, busy mesh 12 x 12", reference_case),
        measure("busy mesh 320 x 320, 1 thread", lambda: run_layout(layout, 1)),
        measure("busy mesh 320 x 320, 2 threads", lambda: run_layout(layout, 2)),
        measure("contended mesh 60 x 60, 1 thread", lambda: run_layout(fighting, 1)),
        measure("MeshGEMM 480^3 on 60 x 60", lambda: kernel(run_meshgemm, GemmConfig(algorithm="mesh"), WSE3)),
    ]
    if not args.quick:
        gemv = GemvConfig(grid=600, size=16800)
        whole = BroadcastConfig(width=750, height=994, words=1024)
        rows += [
            measure("GEMV 16,800^2 on 600 x 600", lambda: kernel(run_gemv, gemv, WSE3)),
            measure("broadcast of 1024 words, 750 x 994", lambda: kernel(run_broadcast, whole, WSE2)),
            measure("all-reduce of 1024 words, 750 x 994", lambda: run_layout(all_reduce(750, 994, 1024), None)),
        ]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory {peak_bytes / 2**30:.2f} GiB")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "peak_bytes": peak_bytes}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
