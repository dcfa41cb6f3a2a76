"""Units whose code torch.compile has made faster: each distinct function is compiled once, however many Units share it.

Results are the same from run to run, but not the bits of uncompiled code: operations are fused, so they round
otherwise. Random numbers are drawn as uncompiled code draws them, so a forward that is computed again in backward
draws the same. Where compiling does not work the code runs as it is, with a warning that says why.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openwafer.graph.unit import Graph, UnitFunction

_log = logging.getLogger(__name__)
Code = Callable[..., Any]
# Inductor's own random numbers depend on how it arranged the code, which differs between forward and recomputation.
_OPTIONS: dict[str, Any] = {"fallback_random": True}


@dataclass(frozen=True, eq=False)
class CompiledFunction(UnitFunction):
    """A function that is compiled when it is first called on a device, for each way it is called."""

    compiled: dict[torch.device, Code] = field(default_factory=dict, repr=False)  # filled by the first call

    def __getstate__(self) -> dict[str, Any]:
        """Sent to another process, it is compiled there."""
        return {**super().__getstate__(), "compiled": {}}

    def _code_on(self, device: torch.device) -> Code:
        if device not in self.compiled:
            self.compiled[device] = self._careful(super()._code_on(device), device)
        return self.compiled[device]

    def _careful(self, plain: Code, device: torch.device) -> Code:
        """Compiled code that gives way to `plain` for good if it turns out that it cannot be compiled."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch._functorch import config

        fast = torch.compile(plain, fullgraph=True, dynamic=False, options=_OPTIONS)

        def run(*tensors: Tensor) -> Any:
            try:
                # Backward is compiled with forward, not in the middle of autograd, where it is too late to give way.
                with config.patch(force_non_lazy_backward_lowering=True):
                    return fast(*tensors)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                _log.warning("Unit function %d runs uncompiled: %s", self.index, _reason(error))
                self.compiled[device] = plain
                return plain(*tensors)

        return run


def compiled(graph: Graph, device: torch.device) -> Graph:
    """The same Graph with compiled functions, or the Graph itself, with a warning, where there is no compiler."""
    if not _can_compile(device):
        return graph
    functions = {function: _compiled_function(function) for function in graph.functions}
    units = tuple(dataclasses.replace(unit, function=functions[unit.function]) for unit in graph.units)
    return dataclasses.replace(graph, units=units)


def _compiled_function(function: UnitFunction) -> CompiledFunction:
    values = {each.name: getattr(function, each.name) for each in dataclasses.fields(function)}
    return CompiledFunction(**values)


@functools.cache
def _can_compile(device: torch.device) -> bool:
    """Found by trying, once."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        torch.compile(_probe, fullgraph=True, dynamic=False, options=_OPTIONS)(torch.ones(64, device=device))
    except (TorchDynamoException, ImportError, OSError) as error:
        _log.warning("compile: nothing is compiled, Units run as they are: %s", _reason(error))
        return False
    return True


def _probe(x: Tensor) -> Tensor:
    return torch.sin(x) + 1


def _reason(error: BaseException) -> str:
    """The innermost cause, in a line."""
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0] if lines else 'no reason given'}"
