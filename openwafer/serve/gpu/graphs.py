"""A computation recorded as a CUDA graph: its kernels are launched as one, reading and writing fixed memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Outputs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    graph: torch.cuda.CUDAGraph
    outputs: Outputs

    def replay(self) -> Outputs:
        """Run it on what the inputs' memory holds now; the outputs are valid until the next replay."""
        self.graph.replay()
        return self.outputs


def record(compute: Callable[[], Outputs], pool: Any) -> Recorded:
    """Record `compute`, which must do the same whatever the values of its inputs.

    Graphs that never run at the same time share the memory of `pool`, a `torch.cuda.graph_pool_handle()`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles kernels and lets libraries take their workspaces
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = compute()
    return Recorded(graph=graph, outputs=outputs)
