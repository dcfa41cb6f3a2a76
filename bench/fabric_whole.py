"""The large GEMMs simulated whole, with values: `python bench/fabric_whole.py summa 2160 360 [--json FILE]`.

Each takes minutes to an hour (on an idle machine with two cores about half the CPU seconds that it prints), so its
result is kept in bench/fabric_whole.json, where `validate_fabric.py` finds it. A row there counts only as long as the
closed formula beside it still gives the number that was recorded with it: other constants need another run.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from openwafer.fabric.engine import EngineMachine
from openwafer.fabric.kernels import meshgemm, summa
from openwafer.fabric.kernels.matrices import GemmConfig
from openwafer.fabric.kernels.outcome import Setting
from openwafer.systems import WSE3

KEPT = Path(__file__).with_name("fabric_whole.json")


def formula_cycles(config: GemmConfig) -> float:
    return (meshgemm if config.algorithm == "mesh" else summa).formula(config, WSE3)


def kept_cycles(config: GemmConfig) -> int | None:
    """Cycles of a whole simulation that was kept and is still good."""
    for row in load(KEPT):
        same = (row["algorithm"], row["size"], row["grid"]) == (config.algorithm, config.size, config.grid)
        if same and row["formula_cycles"] == formula_cycles(config):
            return row["cycles"]
    return None


def load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []


def simulate(config: GemmConfig) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()

    def progress(cycle: int) -> None:
        share = min(1.0, cycle / formula_cycles(config))
        print(f"\rcycle {cycle:,} ({share:.0%}), {time.process_time() - cpu:.0f} CPU s", end="", file=sys.stderr)

    outcome = (meshgemm if config.algorithm == "mesh" else summa).run(config, WSE3, Setting(progress=progress))
    print(file=sys.stderr)
    assert outcome.is_right, f"wrong values: error {outcome.max_error}"
    machine, steps = outcome.simulation.machine, config.grid**3
    assert isinstance(machine, EngineMachine)
    cpu_s = time.process_time() - cpu
    return {
        "algorithm": config.algorithm, "size": config.size, "grid": config.grid, "cycles": outcome.report.cycles,
        "formula_cycles": outcome.formula_cycles, "formula_error": outcome.formula_error,
        "max_error": outcome.max_error, "events_per_pe_step": outcome.report.events / steps,
        "us_per_pe_step": cpu_s * 1e6 / steps, "cpu_s": cpu_s, "wall_s": time.perf_counter() - start,
        "num_threads": machine.num_threads, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=["summa", "mesh"])
    parser.add_argument("size", type=int, help="rows and columns of the matrices")
    parser.add_argument("grid", type=int, help="PEs in each direction")
    parser.add_argument("--json", type=Path, default=KEPT, help="keep the row there")
    args = parser.parse_args()
    config = GemmConfig(grid=args.grid, size=args.size, algorithm=args.algorithm)
    row = simulate(config)
    print(json.dumps(row, indent=1))
    key = ("algorithm", "size", "grid")
    others = [old for old in load(args.json) if any(old[name] != row[name] for name in key)]
    rows = sorted([*others, row], key=lambda row: tuple(row[name] for name in key))
    args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
