"""How a run goes: steps, batches, checkpoints. This module imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openwafer.config import option
from openwafer.errors import UserError

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run."""

    model_dir: Path = option(Path("model_dir"), help="where checkpoints and metrics go; a run there is resumed")
    num_steps: int = option(1000, help="updates of the whole run", minimum=0)
    mode: Literal["train", "eval", "train_and_eval"] = option(
        "train", help="train; eval: measure the last checkpoint; train_and_eval: train, then measure"
    )
    batch_size: int = option(32, help="samples per update, over all workers", minimum=1)
    micro_batch_size: int | None = option(
        None,
        help="samples that go through the model at once (default: all; on a GPU, as many as fit device_memory)",
        minimum=1,
    )
    seed: int = option(0, help="initial weights, order of samples and dropout", minimum=0)
    device: Literal["cpu", "cuda"] = option("cpu", help="where Units are computed")
    device_memory: int | None = option(
        None, help="cuda: the most memory of each GPU to use, such as 8GiB (default: what is free)", size=True
    )
    precision: Precision = option(
        None, help="type that Units are computed in; masters are fp32 (default: bf16 on cuda, fp32 on cpu)"
    )
    num_csx: int = option(1, help="number of workers; the result is the same with any number", minimum=1)
    recompute: bool = option(
        True, help="compute what is inside a Unit again in backward; false: keep it, which is faster and takes memory"
    )
    compile: bool = option(False, help="compile each distinct Unit function with torch.compile")
    checkpoint_every: int | None = option(None, help="steps between checkpoints (default: only at the end)", minimum=1)
    keep_checkpoints: int | None = option(3, help="how many checkpoints to keep (empty: all)", minimum=1)
    eval_every: int | None = option(None, help="steps between evaluations (default: none in between)", minimum=1)
    eval_batches: int = option(8, help="batches of held-out text per evaluation", minimum=1)
    log_every: int = option(10, help="steps between lines when the output is not a terminal", minimum=1)

    def __post_init__(self) -> None:
        if self.precision is None:
            object.__setattr__(self, "precision", "bf16" if self.device == "cuda" else "fp32")
        if self.device == "cpu" and self.device_memory is not None:
            raise UserError(f"device_memory {self.device_memory} is for --device cuda: on the CPU give --dram")
        if self.batch_size % self.micro_batch:
            raise UserError(
                f"micro_batch_size {self.micro_batch} does not divide batch_size {self.batch_size}: "
                "micro-batches all have the same size"
            )

    @property
    def micro_batch(self) -> int:
        return self.micro_batch_size or self.batch_size

    @property
    def num_micro_batches(self) -> int:
        return self.batch_size // self.micro_batch

    @property
    def most_micro_batches(self) -> int:
        """On a GPU the size of micro-batches may be still to be found."""
        return self.batch_size if self.device == "cuda" and self.micro_batch_size is None else self.num_micro_batches


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Where a run writes its timeline. Flags only: a trace is of this run, not of those that resume it."""

    trace: Path | None = option(None, help="write a timeline of some steps to this file, for ui.perfetto.dev")
    trace_steps: tuple[int, ...] | None = option(
        None, help="first and last step in the timeline, such as 10,12 (default: the first ten of this run)", minimum=1
    )

    def __post_init__(self) -> None:
        if self.trace_steps is None:
            return
        if self.trace is None:
            raise UserError("--trace_steps says which steps, but --trace FILE says where: give both")
        if len(self.trace_steps) not in (1, 2) or self.trace_steps[0] > self.trace_steps[-1]:
            shown = ",".join(map(str, self.trace_steps)) or "none"
            raise UserError(f"--trace_steps must be one step or a first and a last such as 10,12, got {shown}")
