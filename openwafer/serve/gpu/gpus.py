"""The GPUs of this host. A test has others, of host memory."""

import torch

from openwafer.errors import UserError
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.device import Device
from openwafer.serve.gpu.plain import Kernels
from openwafer.serve.program import Program


class Gpus:
    # About what CUDA, its libraries and its kernels take on a GPU for each process, before any tensor.
    context_bytes = 640 << 20

    def count(self) -> int:
        """At least one."""
        if not torch.cuda.is_available():
            raise UserError("device cuda: PyTorch sees no GPU here; use --device cpu, or a PyTorch built for CUDA")
        return torch.cuda.device_count()

    def memory(self, index: int) -> tuple[int, int]:
        """(free, all) bytes, whoever uses the rest."""
        torch.cuda.empty_cache()  # a model that was served before does not count
        return torch.cuda.mem_get_info(index)

    def open(self, index: int) -> Device:
        from openwafer.csx.gpu import Gpu

        return Gpu(index)

    def kernels(self, program: Program, config: EngineConfig, device: Device) -> Kernels:
        from openwafer.serve.gpu.fast import best_kernels

        return best_kernels(program, config.batch_invariant)
