"""The life of a CSX rank: it waits for commands and computes its share of each step."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from openwafer.csx.worker import Pass, Worker
from openwafer.graph import Graph, Unit
from openwafer.graph.run import forward_unit
from openwafer.swarmx.message import Message
from openwafer.swarmx.port import Port

STEP, BACKWARD, EVALUATE, STOP = "step", "backward", "evaluate", "stop"


class Csx:
    """Computes what the first store asks for. `eval_graph` gives the model as captured in eval mode."""

    def __init__(self, port: Port, worker: Worker, eval_graph: Callable[[], Graph]) -> None:
        self.port = port
        self.worker = worker
        self._eval_graph = eval_graph
        self._relay = BufferRelay(port, worker.graph)
        self._pass: Pass | None = None
        self._devices = [port.device] if port.device.type == "cuda" else []

    def serve(self) -> None:
        """Until told to stop."""
        while True:
            message = self.port.command()
            with torch.random.fork_rng(devices=self._devices):  # Units set the random state
                match message.fields["do"]:
                    case "step":
                        self._forward(message)
                    case "backward":
                        self._backward(message.fields["scale"])
                    case "evaluate":
                        self._evaluate(message)
                    case "stop":
                        return

    def _forward(self, message: Message) -> None:
        fields = message.fields
        share, step = range(*fields["share"]), fields["step"]
        values, buffers = unpacked(message.tensors, len(share))
        self.port.expect(fields["total"], share)
        self._relay.start(is_first=share.start == 0)
        done = self.worker.forward_share(self.port.stream, values, buffers, step, share, fields["total"], self._relay)
        losses, counts = self.worker.losses(done)
        is_good = all(map(math.isfinite, losses))
        suspect = None if is_good else first_bad_unit(self.worker.graph, done)
        report = {"losses": losses, "counts": counts, "suspect": suspect, "waited_s": self.port.waits.take()}
        self.port.tell(Message("loss", report))
        self._pass = done

    def _backward(self, scale: float) -> None:
        assert self._pass is not None
        for unit, gradients in self.worker.backward_share(self.port.stream, self._pass, scale):
            self.port.send(unit, gradients)
        self.port.flush()
        self._pass = None

    def _evaluate(self, message: Message) -> None:
        graph = self._eval_graph()
        values, buffers = unpacked(message.tensors, message.fields["num_micro_batches"])
        state = {**graph.constants, **buffers}
        last_use = graph.last_use()
        for unit, weights in self.port.stream(graph.units):
            for kept in values:
                outputs, _ = forward_unit(unit, weights, state, kept)
                kept.update(zip(unit.outputs, outputs, strict=True))
                for name in unit.inputs:
                    if last_use[name] == unit.index:
                        del kept[name]
        names = self.worker.loss
        losses = [kept[names.loss].item() for kept in values]
        counts = [1 if names.count is None else int(kept[names.count].item()) for kept in values]
        self.port.tell(Message("evaluated", {"losses": losses, "counts": counts}))


class BufferRelay:
    """Buffers that Units change go from worker to worker, so that they change in the order of micro-batches."""

    def __init__(self, port: Port, graph: Graph) -> None:
        self._port = port
        self._changing = changing_buffers(graph)
        self._is_first = True

    def start(self, *, is_first: bool) -> None:
        self._is_first = is_first

    def take(self, unit: Unit) -> Mapping[str, Tensor]:
        if unit.index not in self._changing or (self._is_first and not self._changing[unit.index]):
            return {}
        return self._port.hear("buffers").tensors

    def give(self, unit: Unit, buffers: Mapping[str, Tensor]) -> None:
        if unit.index in self._changing:
            self._port.tell(Message("buffers", {"unit": unit.index}, buffers))


def changing_buffers(graph: Graph) -> dict[int, bool]:
    """The Units with buffers that training changes, and whether an earlier Unit changes one of them."""
    changed: set[str] = set()
    found: dict[int, bool] = {}
    updated = {name for unit in graph.units for name in unit.updated_buffers}
    for unit in graph.units:
        if updated & set(unit.buffers):
            found[unit.index] = bool(changed & set(unit.buffers))
        changed.update(unit.updated_buffers)
    return found


def packed(values: list[dict[str, Tensor]], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Micro-batches and buffers as the tensors of one message."""
    named = {f"{index}/{name}": tensor for index, batch in enumerate(values) for name, tensor in batch.items()}
    return named | {f"buffer/{name}": tensor for name, tensor in buffers.items()}


def unpacked(tensors: Mapping[str, Tensor], num_micro_batches: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    values: list[dict[str, Any]] = [{} for _ in range(num_micro_batches)]
    buffers: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        (buffers if group == "buffer" else values[int(group)])[rest] = tensor
    return values, buffers


def first_bad_unit(graph: Graph, done: Pass) -> str | None:
    """The first Unit whose result is not finite."""
    for unit in graph.units:
        for values in done.values:
            if any(name in values and not torch.isfinite(values[name]).all() for name in unit.outputs):
                return unit.name
    return None
