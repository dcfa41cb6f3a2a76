"""Train a model: `openwafer train --params FILE [--num_steps N] [--model_dir DIR]`; the same command resumes.

Flags win over the params file; the defaults below hold for keys that neither gives.
"""

import argparse
import json

from openwafer.config import add_flags, flag_values
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.swarmx.config import SwarmConfig
from openwafer.train.config import TraceConfig, TrainConfig

_TRAIN_FLAGS = (
    "num_csx",
    "model_dir",
    "num_steps",
    "mode",
    "device",
    "device_memory",
    "precision",
    "batch_size",
    "micro_batch_size",
    "seed",
    "recompute",
    "compile",
    "checkpoint_every",
    "eval_every",
    "log_every",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--params", metavar="FILE", help="params file, or a preset such as gpt_tiny (default: those of the checkpoint)"
    )
    add_flags(parser, TrainConfig, _TRAIN_FLAGS)
    add_flags(parser, OptimizerConfig, ("lr",))
    add_flags(parser, MemoryConfig, ("dram", "flash"))
    add_flags(parser, SwarmConfig, ("num_memoryx", "min_csx", "csx_threads", "lost_after", "max_restarts"))
    add_flags(parser, TraceConfig, ("trace", "trace_steps"))
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    from openwafer.params import SECTIONS, run_params

    configs = {"train": TrainConfig, "optimizer": OptimizerConfig, "memoryx": MemoryConfig, "swarmx": SwarmConfig}
    flags = {section: flag_values(cls, args) for section, cls in configs.items()}
    trace = TraceConfig(**flag_values(TraceConfig, args))
    params = run_params(args.params, flags)

    from openwafer.train import launch
    from openwafer.train.job import JobConfig

    sections = {name: getattr(params, name) for name in SECTIONS}
    result = launch.run(JobConfig(**sections, params=params.as_json(), trace=trace))
    if result is None:  # a rank of a run on many hosts, which the first one reports
        return
    summary = {
        **vars(result),
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "model_dir": str(params.train.model_dir),
    }
    if args.json:
        print(json.dumps(summary))
        return
    losses = [f"{name} {value:.4f}" for name, value in summary.items() if name.endswith("loss") and value is not None]
    is_idle = result.tokens_per_s is None  # no step was taken; else the last one was skipped and has no loss
    what = ", ".join(losses) or ("nothing left to do" if is_idle else "skipped, its loss is not finite")
    print(f"step {result.step}: {what}; checkpoint {result.checkpoint}")
