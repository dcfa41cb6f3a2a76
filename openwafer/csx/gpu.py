"""A GPU as a worker process sees it: three streams, and events between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openwafer.csx.device import Moment
from openwafer.csx.footprint import Footprint, measure
from openwafer.graph import Graph
from openwafer.memoryx.pinned import lock, pinned


@dataclass(frozen=True)
class GpuOfWorker:
    """Makes the device of worker i: GPU i modulo the number of GPUs. Goes to the process that uses it."""

    num_gpus: int

    def __call__(self, csx: int) -> "Gpu":
        return Gpu(csx % self.num_gpus)


class Gpu:
    """See `device.Device`."""

    def __init__(self, index: int) -> None:
        self.where = torch.device("cuda", index)
        torch.cuda.set_device(self.where)
        torch.zeros(1, device=self.where)  # CUDA itself takes some memory, which counts
        self._copies_in = torch.cuda.Stream(self.where)
        self._copies_out = torch.cuda.Stream(self.where)
        self._locked: set[int] = set()  # addresses

    def memory(self) -> tuple[int, int]:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.where)

    def allow(self, num_bytes: int) -> None:
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info(self.where)
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), self.where)

    def footprint(
        self, graph: Graph, num_micro_batches: int, num_slots: int, *, recompute: bool, num_parts: int
    ) -> Footprint:
        return measure(graph, num_micro_batches, num_slots, self.where, recompute=recompute, num_parts=num_parts)

    def lock(self, memory: Tensor) -> None:
        if memory.data_ptr() not in self._locked:
            lock(memory)
            self._locked.add(memory.data_ptr())

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return pinned(num_elements, dtype)

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self.where)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.where))
        return event

    def copy_in(self, target: Tensor, source: Tensor, after: Moment) -> torch.cuda.Event:
        assert isinstance(after, torch.cuda.Event)
        with torch.cuda.stream(self._copies_in):
            self._copies_in.wait_event(after)
            target.copy_(source, non_blocking=True)
            return _recorded(self._copies_in)

    def use(self, moment: Moment) -> None:
        assert isinstance(moment, torch.cuda.Event)
        torch.cuda.current_stream(self.where).wait_event(moment)

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        self._copies_out.wait_stream(torch.cuda.current_stream(self.where))
        with torch.cuda.stream(self._copies_out):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._copies_out)  # its memory serves again only after this
            return _recorded(self._copies_out)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps: workers share the cores
    event.record(stream)
    return event
