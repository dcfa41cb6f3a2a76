"""Workers on this host: started, watched and ended with the run.

They are new processes, not forks, and die with the process that started them, however it ends. They share its
memory through descriptors without a name, so nothing is left behind.
"""

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils import _pytree as pytree

from openwafer.csx.loss import find_loss
from openwafer.csx.worker import Worker
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.graph.unit import Value
from openwafer.memoryx.store import Store
from openwafer.memoryx.update import Updater
from openwafer.swarmx.channel import FAILED, Channel, Mailbox, RankLost
from openwafer.swarmx.local import STORE, LocalHub, LocalPort
from openwafer.swarmx.message import Message
from openwafer.swarmx.shared_memory import Arena, ArenaView
from openwafer.swarmx.waits import Waits
from openwafer.train.csx_process import STOP, Csx

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """How workers on this host are run."""

    num_csx: int
    seed: int
    threads: int  # of each worker: with another number, PyTorch's kernels may round otherwise
    timeout_s: float  # a worker that is silent for so long is lost
    worker_options: dict[str, Any] = dataclasses.field(default_factory=dict)


class LocalSwarm:
    """The processes of a run and the hub that joins them."""

    def __init__(self, graph: Graph, store: Store, updater: Updater, arena: Arena, config: LocalConfig) -> None:
        self.config = config
        self._mailbox = Mailbox()
        self._processes: list[BaseProcess] = []
        self._objects: list[Connection] = []  # over which graphs are sent
        self._eval_graph: Graph | None = None
        outboxes = [Arena(f"openwafer-csx{index}") for index in range(config.num_csx)]
        views = [ArenaView(outbox.descriptor, writable=False) for outbox in outboxes]
        self.hub = LocalHub(store, self._mailbox, updater.wait, arena, views)
        try:
            for index, outbox in enumerate(outboxes):
                self._start(index, graph, store, arena, outbox)
            for index in range(config.num_csx):
                self.hub.hear(index, "ready")
        except BaseException:
            self.close()
            raise

    def _start(self, index: int, graph: Graph, store: Store, arena: Arena, outbox: Arena) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        objects, their_objects = context.Pipe()
        start = CsxStart(
            index=index,
            parent=os.getpid(),
            config=self.config,
            graph=GraphParcel(graph),
            wire=str(torch.bfloat16 if store.wire == "bf16" else torch.float32).removeprefix("torch."),
            connection=theirs,
            objects=their_objects,
            weights=SharedDescriptor(arena.descriptor),
            outbox=SharedDescriptor(outbox.descriptor),
        )
        process = context.Process(target=_run_csx, args=(start,), name=f"openwafer-csx{index}", daemon=True)
        with _environment(self.config):
            process.start()
        theirs.close()
        their_objects.close()
        self._processes.append(process)
        self._objects.append(objects)
        name = f"csx {index} (process {process.pid})"
        timeout_s = self.config.timeout_s
        self.hub.channels.append(
            Channel(ours, self._mailbox, rank=index, name=name, timeout_s=timeout_s, status=dict)
        )

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def share_eval_graph(self, graph: Graph) -> None:
        """Workers get the graph that `evaluate` will ask for."""
        if self._eval_graph is not graph:
            assert self._eval_graph is None, "a run has one eval graph"
            for connection in self._objects:
                connection.send(GraphParcel(graph))
            self._eval_graph = graph

    def close(self) -> None:
        """Ask the workers to stop; those that do not are killed."""
        with contextlib.suppress(RankLost, UserError, OSError):
            self.hub.tell_all(Message("command", {"do": STOP}))
        is_lost = self._mailbox.lost is not None
        for channel in self.hub.channels:
            channel.stop()
        for process in self._processes:
            process.join(0 if is_lost else 5)
            if process.is_alive():
                process.kill()
                process.join()
        self._mailbox.fail(RankLost("every worker", "the run is over"))  # whoever still waits
        for channel in self.hub.channels:
            channel.close()
        self.hub.close()
        for connection in self._objects:
            connection.close()


class SharedDescriptor:
    """A file descriptor that a new process gets as its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_descriptor, (reduction.DupFd(self.number),)


def _received_descriptor(handle: Any) -> SharedDescriptor:
    return SharedDescriptor(handle.detach())


class GraphParcel:
    """A graph on its way to a process. Of the result's structure only the loss goes along."""

    def __init__(self, graph: Graph) -> None:
        names = find_loss(graph)
        outputs = [Value(names.loss)] if names.count is None else [Value(names.loss), Value(names.count)]
        self._outputs = tuple(outputs)
        self._graph = dataclasses.replace(graph, outputs=self._outputs, output_tree=None)

    def unpacked(self) -> Graph:
        result = self._outputs[0] if len(self._outputs) == 1 else self._outputs
        return dataclasses.replace(self._graph, output_tree=pytree.tree_structure(result))


@dataclass(frozen=True, kw_only=True)
class CsxStart:
    """What a worker process is given when it starts."""

    index: int
    parent: int
    config: LocalConfig
    graph: GraphParcel
    wire: str
    connection: Connection
    objects: Connection
    weights: SharedDescriptor
    outbox: SharedDescriptor


def _run_csx(start: CsxStart) -> None:
    _die_with(start.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which asks us to stop
    torch.set_num_threads(start.config.threads)
    mailbox, waits = Mailbox(), Waits()
    channel = Channel(
        start.connection,
        mailbox,
        rank=STORE,
        name=f"the run (process {start.parent})",
        timeout_s=start.config.timeout_s,
        status=waits.status,
        on_lost=lambda error: _leave(f"csx {start.index}: {error}"),
    )
    graph = start.graph.unpacked()
    weights = ArenaView(start.weights.number, writable=False)
    outbox = Arena("", start.outbox.number)
    port = LocalPort(
        graph, mailbox, channel.send, weights, outbox, wire=getattr(torch, start.wire), waits=waits
    )
    received: list[Graph] = []

    def eval_graph() -> Graph:
        if not received:
            received.append(start.objects.recv().unpacked())
        return received[0]

    try:
        port.tell(Message("ready"))
        Csx(port, Worker(graph, start.config.seed, **start.config.worker_options), eval_graph).serve()
    except UserError as error:
        port.tell(Message(FAILED, {"error": str(error)}))
    os._exit(0)  # at once: threads that wait for the connection must not hold the process


def _die_with(parent: int) -> None:
    """The kernel ends this process when the parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os._exit(1)


def _leave(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def _environment(config: LocalConfig) -> Any:
    """Threads of workers that have to share cores sleep while they wait, instead of spinning."""
    cores = len(os.sched_getaffinity(0))
    settings = {"OMP_NUM_THREADS": str(config.threads)}
    if config.num_csx * config.threads > cores:
        settings |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
