"""A device of host memory on which everything happens in the worst order that was allowed.

A copy is made only when somebody waits for it; until then its target is full of NaN. What was computed counts as still
running until a copy has waited for it: writing over memory that it reads is an error. So is changing memory that is
copied from before the host has waited for that copy. `log` says in which order things were asked for; "wait" is the
host waiting.
"""

from collections import deque
from dataclasses import dataclass

import torch

from openwafer.csx.device import Moment
from openwafer.direct_io import aligned_bytes
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.device import Device
from openwafer.serve.gpu.gpus import Gpus
from openwafer.serve.gpu.layer_stream import weights_of
from openwafer.serve.gpu.places import Places
from openwafer.serve.gpu.plain import Kernels, PlainKernels
from openwafer.serve.gpu.plan import Attention, Project
from openwafer.serve.gpu.plan_builder import PlanBuilder
from openwafer.serve.gpu.runner import GpuRunner
from openwafer.serve.loading import load_program
from openwafer.serve.program import Norm, Program
from openwafer.serve.region import Region

NAN = 255  # in every byte: not a number in fp32, bf16 and fp16


@dataclass(frozen=True)
class Computed:
    """Reached when the first `count` reads of weights are over."""

    count: int

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait for the device")


@dataclass(frozen=True)
class Copied:
    """Reached when the first `count` copies are made."""

    count: int
    device: "LateGpu"

    def synchronize(self) -> None:
        self.device.log.append("wait")
        self.device.wait(self.count)


class LateGpu:
    """See `serve.gpu.device.Device`."""

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self.log: list[str] = []
        self.allowed_bytes: int | None = None
        self.num_held_bytes = 0  # asked for with `empty`
        self._pending: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._num_copied = 0
        self._sources: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque(maxlen=16)  # (copy, memory, what it held)
        self._reads: list[tuple[int, int]] = []  # first and last address

    def allow(self, num_bytes: int) -> None:
        self.allowed_bytes = num_bytes

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = num_elements * dtype.itemsize
        return aligned_bytes(num_bytes)[:num_bytes].fill_(NAN).view(dtype)

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        self.num_held_bytes += num_elements * dtype.itemsize
        return self.host_memory(num_elements, dtype)

    def now(self) -> Computed:
        return Computed(len(self._reads))

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Moment) -> Copied:
        assert isinstance(after, Computed)
        first, last = target.data_ptr(), target.data_ptr() + target.nbytes
        for start, stop in self._reads[after.count :]:
            assert stop <= first or last <= start, "weights are overwritten while they are read"
        for _, memory, held in self._sources:
            assert torch.equal(memory, held), "memory changes while it may still be copied from"
        self.log.append("copy")
        target.fill_(NAN)
        self._pending.append((target, source))
        self._sources.append((self._num_copied + len(self._pending), source, source.clone()))
        return Copied(self._num_copied + len(self._pending), self)

    def use(self, moment: Moment) -> None:
        assert isinstance(moment, Copied)
        self.log.append("use")
        self._copy_until(moment.count)

    def wait(self, count: int) -> None:
        """The host knows from now on that so many copies are made."""
        self._copy_until(count)
        while self._sources and self._sources[0][0] <= count:
            self._sources.popleft()

    def _copy_until(self, count: int) -> None:
        while self._num_copied < count:
            target, source = self._pending.popleft()
            target.copy_(source)
            self._num_copied += 1

    def read(self, weight: torch.Tensor) -> None:
        """A kernel reads a weight."""
        self._reads.append((weight.data_ptr(), weight.data_ptr() + weight.nbytes))


class WatchedKernels(PlainKernels):
    """The definition, each row by itself as with `--batch_invariant`; the device is told what is read."""

    def __init__(self, device: LateGpu) -> None:
        self._device = device

    def norm(self, step: Norm, src: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._device.read(step.weight)
        return super().norm(step, src, dtype)

    def project(self, step: Project, src: torch.Tensor, wide: bool) -> torch.Tensor:
        for tensor in weights_of(step):
            self._device.read(tensor)
        return torch.cat([super(WatchedKernels, self).project(step, row, wide) for row in src.split(1)])

    def attend(
        self, step: Attention, qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Over exactly the row's own past, so that no sum depends on how long the others are."""
        attend = step.attend
        out = qkv.new_zeros(qkv.shape[0], attend.q.width)
        table = places.table()
        for row, (position, sequence) in enumerate(
            zip(places.positions.tolist(), places.sequences.tolist(), strict=True)
        ):
            start = 0 if attend.window is None else max(0, position + 1 - attend.window)
            blocks = table[sequence][: position // keys.shape[2] + 1]
            k, v = (
                part[blocks].transpose(0, 1).flatten(1, 2)[:, start : position + 1].float() for part in (keys, values)
            )
            q = qkv[row, : attend.q.width].float().view(k.shape[0], -1, attend.head_size)
            weights = ((q @ k.transpose(1, 2)) * attend.scale).softmax(dim=-1)
            out[row] = (weights @ v).flatten().to(out.dtype)
        return out


class LateGpus(Gpus):
    """So many of them, each with 4 MiB; what they were opened for is in `opened`."""

    context_bytes = 4096

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self.opened: list[LateGpu] = []

    def count(self) -> int:
        return self._count

    def memory(self, index: int) -> tuple[int, int]:
        return 4 << 20, 4 << 20

    def open(self, index: int) -> LateGpu:
        self.opened.append(LateGpu())
        return self.opened[-1]

    def kernels(self, program: Program, config: EngineConfig, device: Device) -> Kernels:
        assert isinstance(device, LateGpu)
        return WatchedKernels(device)


def watched_runner(
    device: LateGpu, model: StoredModel, config: ModelConfig, builder: PlanBuilder, dtype: torch.dtype
) -> GpuRunner:
    """A small runner whose streamed layers `builder` takes while the model is loaded."""
    program = load_program(model, EngineConfig(), taker=builder)
    return GpuRunner(
        program,
        num_blocks=8,
        max_rows=64,
        max_sequences=4,
        device=device.where,
        dtype=dtype,
        kernels=WatchedKernels(device),
        plan=builder.plan(Region.whole(config)),
        stream=builder.stream,
    )
