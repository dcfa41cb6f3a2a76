"""Who does what: the micro-batches of a worker."""

from openwafer.errors import UserError


def share_of(total: int, num_workers: int, worker: int) -> range:
    """A worker's run of the `total` micro-batches; runs differ in length by one at most, the longer ones first."""
    return range(_start(total, num_workers, worker), _start(total, num_workers, worker + 1))


def check_shares(total: int, num_workers: int) -> None:
    """Each worker needs something to do."""
    if num_workers > total:
        raise UserError(
            f"num_csx {num_workers} is more than the {total} micro-batch{'es' * (total > 1)} of a step: "
            f"use at most num_csx {total}, or a smaller micro_batch_size"
        )


def _start(total: int, num_workers: int, worker: int) -> int:
    least, longer = divmod(total, num_workers)
    return worker * least + min(worker, longer)
