"""A device made of host memory whose copies come late: whoever does not wait for them finds NaN, or what was before."""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openwafer.csx.device import Moment
from openwafer.csx.footprint import Footprint, footprint_of
from openwafer.graph import Graph

FREE_BYTES, TOTAL_BYTES = 60 << 20, 64 << 20


class LateMoment:
    """Reached when `event` is set."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        assert self.event.wait(30)


class Copies:
    """One thread that copies in order, each copy a millisecond after it was asked for."""

    def __init__(self) -> None:
        self._work: queue.Queue[tuple[Callable[[], None], threading.Event]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], None]) -> LateMoment:
        done = threading.Event()
        self._work.put((work, done))
        return LateMoment(done)

    def _run(self) -> None:
        while True:
            work, done = self._work.get()
            time.sleep(0.001)
            work()
            done.set()


class LateDevice:
    """See `csx.device.Device`."""

    def __init__(self, csx: int) -> None:
        self.where = torch.device("cpu")
        self._in, self._out = Copies(), Copies()
        self.allowed_bytes: int | None = None

    def memory(self) -> tuple[int, int]:
        return FREE_BYTES, TOTAL_BYTES

    def allow(self, num_bytes: int) -> None:
        self.allowed_bytes = num_bytes

    def footprint(
        self, graph: Graph, num_micro_batches: int, num_slots: int, *, recompute: bool, num_parts: int
    ) -> Footprint:
        working = max(spec.num_bytes for spec in graph.values.values())
        return footprint_of(graph, num_micro_batches, num_slots, working, recompute=recompute, num_parts=num_parts)

    def lock(self, memory: Tensor) -> None:
        assert memory.data_ptr() % os.sysconf("SC_PAGESIZE") == 0
        start = memory.view(torch.uint8)[:1]
        start.copy_(start.clone())  # CUDA wants memory that can be written

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.full((num_elements,), torch.nan, dtype=dtype)

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.full((num_elements,), torch.nan, dtype=dtype)

    def now(self) -> LateMoment:
        done = threading.Event()
        done.set()
        return LateMoment(done)

    def copy_in(self, target: Tensor, source: Tensor, after: Moment) -> LateMoment:
        assert isinstance(after, LateMoment)
        assert after.event.is_set()
        target.fill_(torch.nan)
        return self._in.put(lambda: target.copy_(source))

    def use(self, moment: Moment) -> None:
        moment.synchronize()

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> LateMoment:
        for target, _ in pairs:
            target.fill_(torch.nan)
        return self._out.put(lambda: [target.copy_(source) for target, source in pairs] and None)


@dataclass(frozen=True)
class LateDevices:
    """Makes the device of a worker, in its process."""

    def __call__(self, csx: int) -> LateDevice:
        return LateDevice(csx)
