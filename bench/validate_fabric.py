"""The simulated wafer against published measurements: `python bench/validate_fabric.py [--json FILE] [--whole]`.

One set of constants per chip (openwafer/systems.py); the evidence class stands beside each row, because a chip, the
vendor's simulator and a derived number are not the same thing. GEMMs on hundreds of PEs squared take long: their rows
come from whole simulations that were kept (bench/fabric_whole.py), or else from the closed formula, whose error against
the simulation of the same tiles on a small grid is printed too. --whole simulates them all here and now.
The rest takes about ten minutes of CPU time and, for the decode layers, 6 GB of memory.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fabric_whole import kept_cycles

from openwafer.fabric import Layout, ProgramBuilder, Simulation
from openwafer.fabric.kernels import meshgemm, summa
from openwafer.fabric.kernels.catalog import KERNELS
from openwafer.fabric.kernels.matrices import GemmConfig
from openwafer.fabric.kernels.outcome import Setting
from openwafer.systems import WAFERS, WSE2, WSE3

SMALL_GRID = 24


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    evidence: str
    measured: float
    ours: float
    target: float  # allowed relative error
    how: str = "simulated"

    @property
    def error(self) -> float:
        return self.ours / self.measured - 1

    @property
    def holds(self) -> bool:
        return abs(self.error) <= self.target


def instructions() -> Iterator[Row]:
    """fp32 multiply-accumulates by bank placement."""
    for length, bank, shift, measured in (
        (5124, 2, 0, 2597),
        (5124, 0, 0, 5130),
        (5124, 0, 1, 10254),
        (1028, 0, 0, 1034),
        (1028, 0, 1, 2062),
    ):
        cycles = run_mac(length, bank, shift)
        what = f"fp32 MAC of {length}, bank {bank}, offset {shift}"
        yield Row(what=what, evidence="vendor sim, WSE-2", measured=measured, ours=cycles, target=0.015)


def run_mac(length: int, bank: int, shift: int) -> int:
    def program(pe: ProgramBuilder) -> None:
        a, c = pe.array("a", length + shift, bank=0), pe.array("c", length + shift, bank=bank)
        factor = pe.register()
        with pe.task("main", start=True):
            pe.mac(c[shift:], a[shift:], factor)

    layout = Layout(WSE2, 1, 1)
    layout.place(program)
    return Simulation(layout).run().cycles - WSE2.costs.task_start


def cycles(kernel: str, chip: str, **options: object) -> int:
    chosen = KERNELS[kernel]
    outcome = chosen.run(chosen.config(**options), WAFERS[chip], Setting())
    assert outcome.is_right, f"{kernel}: wrong values, error {outcome.max_error}"
    return outcome.report.cycles


def reductions() -> Iterator[Row]:
    evidence = "vendor sim, WSE-2"
    ours = cycles("reduce", "wse2")
    yield Row(what="chain reduce 512 x 4096", evidence=evidence, measured=7218, ours=ours, target=0.015)
    for step, measured in ((2, 10055), (8, 9117), (32, 8973), (128, 9297)):
        ours = cycles("reduce", "wse2", algorithm="two_phase", step=step)
        what = f"two-phase reduce 512 x 4096, S={step}"
        yield Row(what=what, evidence=evidence, measured=measured, ours=ours, target=0.015)
    ours = cycles("gemm", "wse2", grid=4, size=56, dtype="f32")
    yield Row(what="SUMMA 4 x 4, tiles 14^3 fp32", evidence=evidence, measured=45783, ours=ours, target=0.02)


def gemvs() -> Iterator[Row]:
    for size, grid, measured in (
        (4320, 120, 1026), (4320, 240, 989), (4320, 360, 1190), (4320, 480, 1455), (4800, 600, 1738),
        (14400, 120, 5305), (14400, 240, 2126), (14400, 360, 1728), (14400, 480, 1756), (14400, 600, 1952),
    ):  # fmt: skip
        ours = cycles("gemv", "wse3", grid=grid, size=size)
        yield Row(what=f"MeshGEMV {size}, P={grid}", evidence="WSE-3", measured=measured, ours=ours, target=0.1)
    for grid, measured in ((120, 3035), (360, 6595), (600, 10110)):
        ours = cycles("gemv", "wse3", grid=grid, size=6 * grid, algorithm="pipelined")
        yield Row(what=f"pipelined GEMV, P={grid}", evidence="WSE-3", measured=measured, ours=ours, target=0.1)


GEMMS: list[tuple[Literal["mesh", "summa"], int, int, int]] = [
    ("mesh", 4320, 360, 511_841),
    ("mesh", 4320, 540, 397_755),
    ("mesh", 4320, 720, 385_679),
    ("summa", 2160, 180, 249_021),
    ("summa", 2160, 360, 213_821),
    ("summa", 2160, 540, 238_153),
    ("summa", 2160, 720, 280_520),
]


def gemms(whole: bool) -> Iterator[Row]:
    for algorithm, size, grid, measured in GEMMS:
        ours, how = gemm_cycles(GemmConfig(grid=grid, size=size, algorithm=algorithm), whole)
        what = f"{algorithm} GEMM {size}, P={grid}"
        yield Row(what=what, evidence="WSE-3", measured=measured, ours=ours, target=0.1, how=how)


def gemm_cycles(config: GemmConfig, whole: bool) -> tuple[float, str]:
    """Simulated now, simulated before, or by formula with its error on a small grid."""
    if whole:
        return cycles("gemm", "wse3", **dataclasses.asdict(config)), "simulated"
    kept = kept_cycles(config)
    if kept is not None:
        return kept, "simulated, kept"
    formula: Callable = (meshgemm if config.algorithm == "mesh" else summa).formula
    small = dataclasses.replace(config, grid=SMALL_GRID, size=SMALL_GRID * config.tile)
    gap = formula(small, WSE3) / cycles("gemm", "wse3", **dataclasses.asdict(small)) - 1
    return formula(config, WSE3), f"formula ({gap:+.1%} at P={small.grid})"


# Model, P, elements per PE of width, feed-forward and context, PEs per group, measured cycles. 8B as in the public
# programs (one head); of 34B only the cycles are public: its sizes are rounded up in the same way.
DECODES = [
    ("8B", 420, 10, 35, 10, 21, 16455),
    ("8B", 540, 8, 27, 8, 27, 18683),
    ("8B", 660, 7, 22, 7, 30, 21575),
    ("34B", 420, 20, 53, 10, 21, 18617),
    ("34B", 540, 16, 41, 8, 27, 20070),
    ("34B", 660, 13, 34, 7, 30, 22335),
]


def decodes() -> Iterator[Row]:
    for model, grid, width, ffn, context, group, measured in DECODES:
        sizes = {"width": width * grid, "feed_forward": ffn * grid, "context": context * grid}
        ours = cycles("decode", "wse3", grid=grid, group=group, **sizes)
        yield Row(what=f"decode layer {model}, P={grid}", evidence="WSE-3", measured=measured, ours=ours, target=0.12)


def sparse() -> Iterator[Row]:
    for form, width, height, size, columns, density, measured in (
        ("csc", 32, 6, 768, 68, 0.05, 21218), ("csc", 64, 8, 1024, 68, 0.05, 14649),
        ("csc", 64, 8, 1024, 68, 0.2, 51512), ("csc", 96, 24, 768, 260, 0.3, 28669),
        ("coo", 64, 8, 1024, 68, 0.05, 17002), ("coo", 64, 8, 1024, 68, 0.1, 31044),
    ):  # fmt: skip
        shape = {"width": width, "height": height, "size": size, "columns": columns, "density": density}
        ours = cycles("spmm", "wse2", algorithm=form, **shape)
        what = f"{form} {width}x{height}, {size}^2, {columns} columns, {density:.0%}"
        yield Row(what=what, evidence="WSE-2", measured=measured, ours=ours, target=0.15)


def sparsity_curve() -> list[dict[str, float]]:
    """Cycles of the streamed AXPY against sparsity: no measurement to hold it to, so it is a curve."""
    return [{"sparsity": s, "cycles": cycles("axpy", "wse2", sparsity=s)} for s in (0, 0.5, 0.75, 0.9, 0.95, 0.99)]


def rows(whole: bool) -> Iterator[Row]:
    yield from instructions()
    yield from reductions()
    yield from sparse()
    yield from gemvs()
    yield from gemms(whole)
    yield from decodes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--whole", action="store_true", help="simulate every GEMM whole (hours)")
    args = parser.parse_args()
    done = []
    print(f"| {'what':44} | evidence | measured | ours | error | allowed | how |\n|---|---|---|---|---|---|---|")
    for row in rows(args.whole):
        done.append({**dataclasses.asdict(row), "error": row.error, "holds": row.holds})
        verdict = "" if row.holds else " MISSES"
        print(
            f"| {row.what:44} | {row.evidence} | {row.measured:,.0f} | {row.ours:,.0f} | {row.error:+.1%}{verdict} | "
            f"{row.target:.1%} | {row.how} |",
            flush=True,
        )
    curve = sparsity_curve()
    print("sparsity: cycles", ", ".join(f"{p['sparsity']:.0%}: {p['cycles']:,.0f}" for p in curve))
    print(f"{sum(row['holds'] for row in done)} of {len(done)} rows hold")
    if args.json:
        args.json.write_text(json.dumps({"rows": done, "sparsity": curve}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
