"""How much device memory a worker may use, and the micro-batch that fits into it."""

from collections.abc import Callable

from openwafer.csx.footprint import Footprint
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.memoryx.placement import shown

_FREE_SHARE = 0.92  # of the free memory, when no limit is given


class DeviceBudget:
    """`limit` bytes for the tensors of a worker, beside `context` bytes that CUDA and others take.

    `measure` gives what a worker takes for a graph and the number of micro-batches of the whole step.
    """

    def __init__(self, limit: int, context: int, measure: Callable[[Graph, int], Footprint]) -> None:
        self.limit = limit
        self.context = context
        self.footprint: Footprint | None = None
        self._measure = measure

    def fit(
        self,
        make_graph: Callable[[int], Graph],
        batch_size: int,
        micro_batch_size: int | None,
        num_csx: int = 1,
    ) -> int:
        """The micro-batch to use: the given one if it fits, else an error; or the largest that fits, with at least one
        micro-batch for every worker."""
        sizes = [size for size in range(1, batch_size // num_csx + 1) if batch_size % size == 0]
        if micro_batch_size is not None:
            sizes = [micro_batch_size]
        assert sizes, "there are fewer samples than workers"
        least = self._measure(make_graph(sizes[0]), batch_size // sizes[0])
        tried = [least]
        for size in reversed(sizes[1:]):
            if _guess(least, size) > self.limit:
                continue
            tried.append(self._measure(make_graph(size), batch_size // size))
            if tried[-1].total_bytes <= self.limit:
                self.footprint = tried[-1]
                return size
        # The smallest micro-batches need least inside a Unit, but most for sums of gradients.
        self._allow(min(tried, key=lambda footprint: footprint.total_bytes))
        self.footprint = least
        return sizes[0]

    def check(self, graph: Graph, num_micro_batches: int) -> None:
        """An error if a step takes more than is allowed."""
        self.footprint = self._measure(graph, num_micro_batches)
        self._allow(self.footprint)

    def _allow(self, footprint: Footprint) -> None:
        if footprint.total_bytes > self.limit:
            raise UserError(
                f"a step needs {shown(footprint.total_bytes + self.context)} of device memory, "
                f"{shown(self.limit + self.context)} are allowed ({footprint}; CUDA itself {shown(self.context)}): "
                "give a larger --device_memory, a smaller --micro_batch_size or --batch_size, or a shorter context"
            )


def share_of_device(device_memory: int | None, free: int, total: int, num_workers: int = 1) -> tuple[int, int]:
    """(limit, context) of each of `num_workers` on a device, in bytes: its part of `device_memory`, or of what is free,
    and of what was in use before."""
    used = total - free
    if device_memory is not None and device_memory - used > free:
        raise UserError(
            f"device_memory {shown(device_memory)}: the GPU has {shown(total)}, and {shown(free)} are free; "
            f"give at most {shown(total)}"
        )
    limit = int(_FREE_SHARE * free) if device_memory is None else device_memory - used
    return limit // num_workers, used // num_workers


def _guess(least: Footprint, size: int) -> int:
    """What micro-batches of `size` would need, from what those of one sample do: a little less than they will."""
    return least.weight_bytes + least.activation_bytes + int(0.5 * size * least.working_bytes)
