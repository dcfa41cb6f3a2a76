"""Many workers behind the face of one: what the streamed trainer sees of a hub.

The trainer computes a step as with one worker; forward and backward are asked of all workers, each on its share of
the micro-batches, and what comes back is added up along the one tree.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from openwafer import timeline
from openwafer.csx.worker import MicroBatch, Pass, Stream, global_count
from openwafer.errors import UserError
from openwafer.graph import Graph, Unit
from openwafer.graph.run import bind_inputs
from openwafer.memoryx.store import Store
from openwafer.memoryx.update import Arrival, UpdateNumbers, Updater
from openwafer.swarmx.hub import Hub
from openwafer.swarmx.message import Message
from openwafer.swarmx.reduction import collected
from openwafer.swarmx.report import CsxReport, SwarmReport, worker_line
from openwafer.swarmx.share import check_shares, share_of
from openwafer.train.csx_process import BACKWARD, EVALUATE, STEP, changing_buffers, packed
from openwafer.train.followers import Followers


class SwarmLink:
    """Updates run in a thread beside the reduction, and the next forward starts as soon as its first Unit is done."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.device = torch.device("cpu")
        self.updater = Updater(store.update)

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        self.drain()
        return self.store.stream(order)

    def send(self, unit: Unit, gradients: Mapping[str, Tensor]) -> Arrival:
        return Arrival(unit, gradients, lambda: True, lambda: None, lambda: None)

    def guess(self, parcel: Arrival, numbers: UpdateNumbers) -> None:
        pass

    def apply(self, parcel: Arrival, numbers: UpdateNumbers) -> None:
        self.updater.post(parcel, numbers)

    def discard(self, parcel: Arrival) -> None:
        pass

    def drain(self) -> None:
        self.updater.drain()

    def close(self) -> None:
        self.updater.close()


class Swarm:
    """All workers of a run. It has the methods of `csx.Worker` that the trainer uses."""

    def __init__(
        self,
        graph: Graph,
        hub: Hub,
        share_eval_graph: Callable[[Graph], None] = lambda graph: None,
        followers: Followers | None = None,
    ) -> None:
        """`share_eval_graph` sees to it that every worker has the graph that is evaluated.

        `followers` are the other stores, where the Units are striped.
        """
        self.graph = graph
        self.hub = hub
        self.followers = followers
        self._share_eval_graph = share_eval_graph
        self.report: SwarmReport | None = None
        self._changing = changing_buffers(graph)
        self._began = time.perf_counter()
        self._counted = (0, 0)

    def forward(
        self, stream: Stream, micro_batches: Sequence[MicroBatch], buffers: Mapping[str, Tensor], step: int
    ) -> Pass:
        """As `Worker.forward`; the weights come from the hub's own store, whatever `stream` is."""
        total, hub = len(micro_batches), self.hub
        check_shares(total, hub.num_csx)
        if self.followers is not None:
            self.followers.start_step()
        self._began = time.perf_counter()
        values = [bind_inputs(self.graph, (), dict(micro_batch)) for micro_batch in micro_batches]
        for csx in range(hub.num_csx):
            share = share_of(total, hub.num_csx, csx)
            fields = {"do": STEP, "step": step, "share": [share.start, share.stop], "total": total}
            hub.tell(csx, Message("command", fields, packed([values[index] for index in share], buffers)))
        hub.cast(hub.store.graph.units)
        done = Pass(step=step, total=total, share=range(0), values=[], buffers=[])
        with timeline.span(timeline.WORKERS, "forward"):
            self._relay(done, buffers)
            reports = [hub.hear(csx, "loss").fields for csx in range(hub.num_csx)]
        losses = [loss for report in reports for loss in report["losses"]]
        done.divisor = global_count([count for report in reports for count in report["counts"]], step)
        done.loss = math.fsum(losses) / done.divisor
        done.suspect = next((report["suspect"] for report in reports if report["suspect"]), None)
        self._waited = [report["waited_s"] for report in reports]
        if self.followers is not None:
            self.followers.tell(Message("loss", {"loss": done.loss, "divisor": done.divisor, "total": total}))
        return done

    def _relay(self, done: Pass, buffers: Mapping[str, Tensor]) -> None:
        """Passes buffers from worker to worker; what the last one leaves is the step's."""
        hub, state = self.hub, dict(buffers)
        for unit in self.graph.units:
            if unit.index not in self._changing:
                continue
            if self._changing[unit.index]:
                needed = {name: state[name] for name in unit.buffers if name in state}
                hub.tell(0, Message("buffers", {}, needed))
            for csx in range(hub.num_csx):
                after = hub.hear(csx, "buffers").tensors
                if csx + 1 < hub.num_csx:
                    hub.tell(csx + 1, Message("buffers", {}, after))
                else:
                    state.update(after)
                    done.updates.update({name: after[name] for name in unit.updated_buffers})

    def backward(self, stream: Stream, done: Pass, scale: float = 1.0) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
        """As `Worker.backward`: each Unit with the finished sums of gradients of the weights it owns."""
        self.hub.tell_all(Message("command", {"do": BACKWARD, "scale": scale}))
        yield from collected(self.hub, done.total)
        self._report(done)

    def all_squares(self, parts: list[Tensor]) -> list[Tensor]:
        """What the norm is made of, of all stores."""
        return parts if self.followers is None else self.followers.all_squares(parts)

    def evaluate(self, micro_batches: Sequence[MicroBatch], graph: Graph, buffers: Mapping[str, Tensor]) -> float:
        """Mean loss of `graph`, which all workers have as their eval graph."""
        hub = self.hub
        self._share_eval_graph(graph)
        values = [bind_inputs(graph, (), dict(micro_batch)) for micro_batch in micro_batches]
        for csx in range(hub.num_csx):
            share = share_of(len(values), hub.num_csx, csx)
            fields = {"do": EVALUATE, "num_micro_batches": len(share)}
            hub.tell(csx, Message("command", fields, packed([values[index] for index in share], buffers)))
        if self.followers is not None:
            self.followers.tell(Message("command", {"do": EVALUATE}))
        hub.cast(hub.store.graph.units)
        reports = [hub.hear(csx, "evaluated").fields for csx in range(hub.num_csx)]
        count = sum(count for report in reports for count in report["counts"])
        if count == 0:
            raise UserError("the batches have no label to evaluate (count 0)")
        return math.fsum(loss for report in reports for loss in report["losses"]) / count

    def _report(self, done: Pass) -> None:
        elapsed = time.perf_counter() - self._began
        traffic, (sent, reduced) = self.hub.traffic, self._counted
        self._counted = (traffic.broadcast_bytes, traffic.reduced_bytes)
        csx = tuple(
            CsxReport(
                name=channel.peer.name,
                micro_batches_per_s=len(share_of(done.total, self.hub.num_csx, index)) / elapsed,
                waited_s=waited,
            )
            for index, (channel, waited) in enumerate(zip(self.hub.channels, self._waited, strict=True))
        )
        self.report = SwarmReport(elapsed, self._counted[0] - sent, self._counted[1] - reduced, csx)

    def lines(self) -> list[str]:
        """Each worker for the live view: its rate, and what it is doing or waiting for now."""
        if self.report is None:
            return []
        doing = [channel.peer.status.get("doing", "") for channel in self.hub.channels]
        return [worker_line(csx, self.report.seconds, now) for csx, now in zip(self.report.csx, doing, strict=True)]
