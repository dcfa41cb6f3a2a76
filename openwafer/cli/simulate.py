"""Run a kernel on the simulated wafer: `openwafer simulate reduce --system wse2 --num_pes 512 --words 4096`."""

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openwafer.config import add_flags, flag_values
from openwafer.errors import UserError

MOST = 1_000_000  # of PEs, words, rows, steps
PAUSES_S = (0.5, 30.0)  # between two lines of progress: on a terminal, elsewhere

if TYPE_CHECKING:
    from openwafer.fabric.kernels.outcome import Outcome
    from openwafer.systems import Wafer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from openwafer.fabric.kernels.catalog import KERNELS
    from openwafer.systems import SYSTEMS, WAFERS

    kernels = parser.add_subparsers(metavar="KERNEL", required=True, dest="kernel")
    for name, kernel in KERNELS.items():
        command = kernels.add_parser(name, help=kernel.summary, description=kernel.summary, allow_abbrev=False)
        add_flags(command, kernel.config, [field.name for field in dataclasses.fields(kernel.config)])
        command.add_argument("--system", default="wse2", metavar="|".join([*WAFERS, *SYSTEMS]), help="(default wse2)")
        command.add_argument("--clock_ghz", type=float, metavar="X", help="for seconds; cycles do not depend on it")
        command.add_argument("--engine", choices=["auto", "c", "reference"], default="auto", help="(default auto)")
        command.add_argument("--seed", type=int, default=0, metavar="N", help="of the random data (default 0)")
        command.add_argument("--heat_map", type=Path, metavar="FILE.svg|.png", help="draw how busy each PE was")
        command.add_argument("--trace", type=Path, metavar="FILE.json", help="write a trace for Perfetto")
        command.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    from openwafer.fabric.kernels.catalog import KERNELS
    from openwafer.fabric.kernels.fitting import run_fitting
    from openwafer.fabric.kernels.outcome import Setting
    from openwafer.systems import wafer

    kernel = KERNELS[args.kernel]
    chip = wafer(args.system)
    _check_files(args)
    if args.seed < 0:
        raise UserError(f"--seed must not be negative, got {args.seed}")
    if args.clock_ghz is not None:
        if not 0 < args.clock_ghz < math.inf:
            raise UserError(f"--clock_ghz must be above 0 and finite, got {args.clock_ghz}")
        chip = dataclasses.replace(chip, clock_hz=args.clock_ghz * 1e9)
    if args.engine == "reference" and (args.trace or args.heat_map):
        raise UserError("--trace and --heat_map need the C engine: leave out --engine reference")
    config = kernel.config(**flag_values(kernel.config, args))
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, int) and value > MOST:
            raise UserError(f"--{name} must be at most {MOST:,}, got {value:,}: no wafer has so many PEs or words")
    progress = _Progress()
    setting = Setting(engine=args.engine, trace=args.trace is not None, progress=progress, seed=args.seed)
    start = time.perf_counter()
    outcome = run_fitting(kernel, config, chip, setting)
    wall_s = time.perf_counter() - start
    progress.end()
    _write_files(outcome, args)
    result = summary(args.kernel, chip, outcome, wall_s)
    if args.json:
        print(json.dumps({"config": dataclasses.asdict(config), "seed": args.seed, **result}))
    else:
        print(_text(result))
    if not outcome.is_right:
        raise UserError(
            f"{args.kernel}: the result differs from NumPy by {outcome.max_error:.3g} of the largest value, more than "
            f"{outcome.tolerance:.3g}: this is a bug of the kernel or the engine, please report it"
        )


def _check_files(args: argparse.Namespace) -> None:
    """Before the run: it may take minutes."""
    from openwafer.fabric.heatmap import SUFFIXES

    picture = args.heat_map
    if picture is not None and picture.suffix.lower() not in SUFFIXES:
        raise UserError(f"--heat_map writes {' or '.join(SUFFIXES)} files, got {str(picture)!r}: name it so")
    for path in (picture, args.trace):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            reason = "it is a folder" if path.is_dir() else "its folder does not exist"
            raise UserError(f"cannot write {path}: {reason}")
    if picture is not None and args.trace is not None and picture.resolve() == args.trace.resolve():
        raise UserError(f"--heat_map and --trace are both {picture}: name two files")


class _Progress:
    """The cycle, in place on a terminal, else as a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._pause_s = PAUSES_S[0] if self._is_terminal else PAUSES_S[1]
        self._shown_s = time.perf_counter()
        self._is_shown = False

    def __call__(self, cycle: int) -> None:
        if time.perf_counter() < self._shown_s + self._pause_s:
            return
        self._shown_s, self._is_shown = time.perf_counter(), True
        start, end = ("\r", "") if self._is_terminal else ("", "\n")
        print(f"{start}cycle {cycle:,}", end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_terminal and self._is_shown:
            print(file=sys.stderr)


def summary(kernel: str, chip: "Wafer", outcome: "Outcome", wall_s: float) -> dict[str, Any]:
    """`seconds` are the chip's at `clock_hz`, `wall_s` those of the simulation by `engine`."""
    report = outcome.report
    return {
        "kernel": kernel,
        "system": chip.name,
        "engine": outcome.simulation.engine,
        "clock_hz": chip.clock_hz,
        "cycles": report.cycles,
        "seconds": chip.seconds(report.cycles),
        "num_pes": report.num_pes,
        "pe_utilisation": report.pe_utilisation,
        "link_utilisation": report.link_utilisation,
        "stalls": dataclasses.asdict(report.stalls),
        "io_words": outcome.simulation.io_words,
        "io_cycles": outcome.simulation.io_cycles,
        "formula_cycles": outcome.formula_cycles,
        "formula_error": outcome.formula_error,
        "max_error": outcome.max_error,
        "tolerance": outcome.tolerance,
        "wall_s": wall_s,
        "pe_cycles_per_s": report.pe_cycles / wall_s,
    }


def _text(result: dict[str, Any]) -> str:
    stalls = result["stalls"]
    lines = [
        f"{result['kernel']} on {result['system']}: {result['cycles']:,} cycles = {result['seconds'] * 1e6:.2f} us",
        f"PEs {result['num_pes']:,}, busy {result['pe_utilisation']:.1%}; links used {result['link_utilisation']:.1%}",
        f"waited for room {stalls['room']:,}, for a link {stalls['link']:,}, for words {stalls['words']:,} cycles",
        f"closed formula {result['formula_cycles']:,.0f} cycles ({result['formula_error']:+.2%})",
        f"host copies {result['io_words']:,} words, {result['io_cycles']:,} cycles of IO besides the run",
        f"values within {result['max_error']:.2g} of NumPy (allowed {result['tolerance']:.2g})",
        f"simulated in {result['wall_s']:.2f} s, {result['pe_cycles_per_s'] / 1e6:.1f} M PE-cycles/s",
    ]
    return "\n".join(lines)


def _write_files(outcome: "Outcome", args: argparse.Namespace) -> None:
    from openwafer.fabric.engine import EngineMachine
    from openwafer.fabric.heatmap import heat_map
    from openwafer.fabric.perfetto import busy_share, trace

    machine = outcome.simulation.machine
    if args.heat_map is None and args.trace is None:
        return
    if not isinstance(machine, EngineMachine):
        raise UserError("--trace and --heat_map need the C engine, which could not be built here")
    files: list[tuple[Path, bytes]] = []
    if args.heat_map is not None:
        shares, cycles = busy_share(machine, outcome.report.cycles), outcome.report.cycles
        height, width = shares.shape
        title = f"{args.kernel} on {args.system}, {width} x {height} PEs, {cycles:,} cycles"
        files.append((args.heat_map, heat_map(shares, title, args.heat_map.suffix.lower())))
    if args.trace is not None:
        files.append((args.trace, trace(machine).encode()))
        if machine.is_cut:
            print(f"the trace ends early, after {len(machine.spans):,} tasks and transfers", file=sys.stderr)
    for path, content in files:
        try:
            path.write_bytes(content)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
