"""Capture of models too large for this machine: seconds and memory, beside plain torch.export and a bare build.

    python bench/capture.py [--presets llama3_70b gpt3_175b] [--repeats 3] [--out docs/results/capture.json]

Each measurement is a new process. The clock starts after torch is imported, and stops when the result is
there; memory is the peak of the whole process, and `import_mib` what importing torch alone takes.

    ours   deferred build, then openwafer's capture: Units with shapes, FLOPs and bytes
    peer   build on the meta device, then torch.export.export of the same module on the same inputs
    floor  build on the meta device and nothing else
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _child import ROOT, child_environment

METHODS = ("ours", "peer", "floor")


def measure(method: str, preset: str) -> dict[str, Any]:
    """One measurement in this process."""
    import torch

    from openwafer.graph import capture
    from openwafer.graph.deferred import deferred
    from openwafer.models.build import build
    from openwafer.params import load_params

    model = load_params(preset).model
    ids = torch.zeros(1, model.max_position_embeddings, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids.clone()}
    import_mib = _peak_mib()
    began = time.perf_counter()
    if method == "ours":
        with deferred():
            module = build(model)
        graph = capture(module, (), inputs)
        found = {"num_units": len(graph.units), "num_functions": len(graph.functions)}
    else:
        with torch.device("meta"):
            module = build(model)
        found = {}
        if method == "peer":
            program = torch.export.export(module, (), inputs, strict=False)
            found = {"num_operations": sum(node.op == "call_function" for node in program.graph.nodes)}
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 2),
        "peak_mib": round(_peak_mib()),
        "import_mib": round(import_mib),
        "num_parameters": sum(parameter.numel() for parameter in module.parameters()),
        **found,
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_new_process(method: str, preset: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", method, "--presets", preset]
    done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def bench(presets: list[str], repeats: int) -> dict[str, Any]:
    """Medians over `repeats` processes, with the fastest and the slowest beside them."""
    rows = []
    for preset in presets:
        for method in METHODS:
            runs = [in_new_process(method, preset) for _ in range(repeats)]
            seconds = [run["seconds"] for run in runs]
            row = {"preset": preset, "method": method, **runs[0]}
            row["seconds"] = statistics.median(seconds)
            row["seconds_range"] = [min(seconds), max(seconds)]
            row["peak_mib"] = max(run["peak_mib"] for run in runs)
            print(f"{preset:12} {method:6} {row['seconds']:8.2f} s {row['peak_mib']:6} MiB", flush=True)
            rows.append(row)
    return {"command": f"bench/capture.py --presets {' '.join(presets)}", "machine": _machine(), "rows": rows}


def _machine() -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch").partition("+")[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["llama3_70b", "gpt3_175b"], help="names of params presets")
    parser.add_argument("--repeats", type=int, default=3, help="processes per measurement (default 3)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "capture.json")
    parser.add_argument("--measure", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.presets[0])))
        return
    result = bench(args.presets, args.repeats)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
