"""From a configuration to a finished run, whatever is lost on the way.

On one host this process is MemoryX and starts the workers. When one of them is lost the run goes on from its last
checkpoint: with as many workers, and with fewer when it happens again before another checkpoint.
"""

import sys

from openwafer import checkpoint
from openwafer.errors import UserError
from openwafer.swarmx.channel import RankLost
from openwafer.swarmx.share import check_shares
from openwafer.swarmx.torchrun import is_distributed
from openwafer.train.gpu import GpuWorker
from openwafer.train.gpu_workers import GpuWorkers
from openwafer.train.job import Job, JobConfig, JobResult
from openwafer.train.model_dir import only_run
from openwafer.train.rank import run_rank
from openwafer.train.workers import LocalWorkers


def run(config: JobConfig) -> JobResult | None:
    """The whole run; under torchrun this rank's part of it, with a result on rank 0."""
    train, swarmx = config.train, config.swarmx
    if is_distributed():
        if train.device == "cuda" and train.micro_batch_size is None:
            raise UserError(
                "device cuda under torchrun needs a --micro_batch_size: what fits is found on one host only"
            )
        return run_rank(config)
    if swarmx.num_memoryx > 1:
        raise UserError(
            f"num_memoryx {swarmx.num_memoryx}: on one host one process holds the weights; several are for many hosts, "
            "under torchrun (docs/cluster.md)"
        )
    swarmx.check(train.num_csx)
    check_shares(train.most_micro_batches, train.num_csx)
    with only_run(train):
        return _run_here(config)


def _run_here(config: JobConfig) -> JobResult:
    """With as many attempts as are allowed."""
    train, swarmx = config.train, config.swarmx
    num_csx, num_restarts, last = train.num_csx, 0, _last_step(config)
    if (done := _finished(config)) is not None:
        return done
    while True:
        try:
            return _attempt(config, num_csx)
        except RankLost as error:
            num_restarts += 1
            if num_restarts > swarmx.max_restarts:
                raise UserError(
                    f"{error}; it was the {num_restarts}th loss and max_restarts is {swarmx.max_restarts}: "
                    "the same command goes on from the last checkpoint"
                ) from None
            step = _last_step(config)
            if step == last and num_restarts > 1:
                num_csx = max(swarmx.min_csx, num_csx - 1)
            last = step
            where = "from the start" if step is None else f"from step {step}"
            _say(f"{error}; going on {where} with {num_csx} workers (restart {num_restarts} of {swarmx.max_restarts})")


def _finished(config: JobConfig) -> JobResult | None:
    """The result of a run that has nothing left to do: it need not load its model to say so."""
    train, newest = config.train, checkpoint.latest(config.train.model_dir)
    if newest is None or train.mode != "train":
        return None
    stored = checkpoint.Checkpoint.open(newest)
    is_same_model = stored.meta.get("params", {}).get("model") == config.params.get("model")
    if stored.step < train.num_steps or not is_same_model:  # another model is refused where it is compared
        return None
    return JobResult(step=stored.step, loss=None, eval_loss=None, tokens_per_s=None, checkpoint=newest)


def _attempt(config: JobConfig, num_csx: int) -> JobResult:
    train = config.train
    workers: LocalWorkers | GpuWorker
    if train.device == "cuda" and num_csx > 1:
        workers = GpuWorkers(num_csx, config.swarmx, train.device_memory, recompute=train.recompute)
    elif train.device == "cuda":
        workers = GpuWorker(train.device_memory, config.optimizer, recompute=train.recompute)
    elif num_csx == 1:
        return Job(config).run()
    else:
        workers = LocalWorkers(num_csx, config.swarmx)
    try:
        return Job(config, workers).run()
    finally:
        workers.close()


def _last_step(config: JobConfig) -> int | None:
    newest = checkpoint.latest(config.train.model_dir)
    return None if newest is None else checkpoint.Checkpoint.open(newest).step


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
