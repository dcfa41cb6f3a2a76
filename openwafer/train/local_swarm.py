"""Workers on this host: started, watched and ended with the run.

They are new processes, not forks, and die with the process that started them, however it ends. They share its
memory through descriptors without a name, so nothing is left behind.
"""

import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils import _pytree as pytree

from openwafer.csx.cuda import NUM_SLOTS
from openwafer.csx.device import Device
from openwafer.csx.loss import find_loss
from openwafer.csx.staging import StagedPort
from openwafer.csx.worker import Worker
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.graph.unit import Value
from openwafer.memoryx.store import Store
from openwafer.swarmx.channel import FAILED, Channel, Mailbox, RankLost
from openwafer.swarmx.local import STORE, LocalHub, LocalPort
from openwafer.swarmx.message import Message
from openwafer.swarmx.shared_memory import Arena, ArenaView
from openwafer.swarmx.waits import Waits
from openwafer.train.csx_process import STOP, Csx
from openwafer.train.streamed import on_device

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """How workers on this host are run."""

    num_csx: int
    threads: int  # of each worker: with another number, PyTorch's kernels may round otherwise
    timeout_s: float  # a worker that is silent for so long is lost
    device: Callable[[int], Device] | None = None  # makes that of each worker, in its process; None: the host's memory


class CsxPool:
    """Worker processes with nothing to do yet, the memory they share with us, and the channels to them."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.mailbox = Mailbox()
        self.weights = Arena("openwafer-weights")
        self.outboxes: list[ArenaView] = []
        self.channels: list[Channel] = []
        self._processes: list[BaseProcess] = []
        self._objects: list[Connection] = []  # over which graphs are sent
        try:
            for index in range(config.num_csx):
                self._start(index)
        except BaseException:
            self.close()
            raise

    def _start(self, index: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        objects, their_objects = context.Pipe()
        outbox = Arena(f"openwafer-csx{index}")
        start = CsxStart(
            index=index,
            parent=os.getpid(),
            config=self.config,
            connection=theirs,
            objects=their_objects,
            weights=SharedDescriptor(self.weights.descriptor),
            outbox=SharedDescriptor(outbox.descriptor),
        )
        process = context.Process(target=_run_csx, args=(start,), name=f"openwafer-csx{index}", daemon=True)
        with _environment(self.config):
            process.start()
        theirs.close()
        their_objects.close()
        self._processes.append(process)
        self._objects.append(objects)
        self.outboxes.append(ArenaView(outbox.descriptor, writable=False))
        name, timeout_s = f"csx {index} (process {process.pid})", self.config.timeout_s
        self.channels.append(Channel(ours, self.mailbox, rank=index, name=name, timeout_s=timeout_s, status=dict))

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def send_object(self, csx: int, value: Any) -> None:
        """To a process of our own, through `multiprocessing`."""
        try:
            self._objects[csx].send(value)
        except OSError as error:
            self.mailbox.fail(RankLost(self.channels[csx].peer.name, f"cannot send to it ({error})"))

    def ask(self, csx: int, question: "DeviceQuestion | FootprintQuestion") -> dict[str, Any]:
        """What a worker without a task answers."""
        self.send_object(csx, question)
        return self.mailbox.get(self.channels[csx].peer.rank, "answer").fields

    def close(self) -> None:
        """End the processes; those that do not go are killed."""
        is_lost = self.mailbox.lost is not None
        for channel in self.channels:
            channel.stop()
        for connection in self._objects:
            connection.close()  # a worker without a task leaves
        for process in self._processes:
            process.join(0 if is_lost else 5)
            if process.is_alive():
                process.kill()
                process.join()
        self.mailbox.fail(RankLost("every worker", "the run is over"))  # for threads that still wait
        for channel in self.channels:
            channel.close()


class LocalSwarm:
    """The workers of one run: all of a pool, or its first `num_csx`."""

    def __init__(
        self,
        pool: CsxPool,
        graph: Graph,
        store: Store,
        ready: Callable[[int], None],
        *,
        seed: int,
        num_csx: int | None = None,
        worker_options: Mapping[str, Any] | None = None,
        device_bytes: int | None = None,
    ) -> None:
        """`ready` blocks until the array of a Unit is up to date. `device_bytes`: the most a worker may use."""
        self._pool = pool
        self._eval_graph: Graph | None = None
        channels = pool.channels[:num_csx]
        self.hub = LocalHub(store, pool.mailbox, ready, channels, pool.weights, pool.outboxes)
        wire = "bfloat16" if store.wire == "bf16" else "float32"
        options = dict(worker_options or {})
        task = CsxTask(GraphParcel(graph), seed=seed, wire=wire, worker_options=options, device_bytes=device_bytes)
        for index in range(len(channels)):
            pool.send_object(index, task)
        for index in range(len(channels)):
            self.hub.hear(index, "ready")

    def share_eval_graph(self, graph: Graph) -> None:
        """Workers get the graph that `evaluate` will ask for."""
        if self._eval_graph is not graph:
            assert self._eval_graph is None, "a run has one eval graph"
            for index in range(self.hub.num_csx):
                self._pool.send_object(index, GraphParcel(graph))
            self._eval_graph = graph

    def close(self) -> None:
        """The workers are free for another run."""
        with contextlib.suppress(UserError, OSError):
            self.hub.tell_all(Message("command", {"do": STOP}))
        self.hub.close()


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


@dataclass(frozen=True)
class CsxTask:
    """What a worker is to train."""

    graph: GraphParcel
    seed: int
    wire: str
    worker_options: dict[str, Any]
    device_bytes: int | None = None


@dataclass(frozen=True)
class DeviceQuestion:
    """How much memory has your device?"""


@dataclass(frozen=True)
class FootprintQuestion:
    """What would a step of this take on your device?"""

    graph: GraphParcel
    num_micro_batches: int
    num_parts: int
    recompute: bool


@dataclass(frozen=True, kw_only=True)
class CsxStart:
    """What a worker process is given when it starts."""

    index: int
    parent: int
    config: PoolConfig
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
    # Only mapped so: CUDA locks no memory that cannot be written.
    weights = ArenaView(start.weights.number, writable=start.config.device is not None)
    outbox = Arena("", start.outbox.number)
    try:
        device = None if start.config.device is None else start.config.device(start.index)
        while True:
            task = start.objects.recv()
            if not isinstance(task, CsxTask):
                assert device is not None
                channel.send(Message("answer", _answer(device, task)))
                continue
            mailbox.clear()
            where = torch.device("cpu") if device is None else device.where
            graph, wire = on_device(task.graph.unpacked(), where), getattr(torch, task.wire)
            lock = (lambda memory: None) if device is None else device.lock
            port = LocalPort(graph, mailbox, channel.send, weights, outbox, wire=wire, waits=waits, lock=lock)
            if device is not None:
                if task.device_bytes is not None:
                    device.allow(task.device_bytes)
                port = StagedPort(port, device)
            worker = Worker(graph, task.seed, **task.worker_options)
            port.tell(Message("ready"))
            Csx(port, worker, _eval_graph_from(start.objects, where)).serve()
            port.close()
    except EOFError:  # the pool is closed
        pass
    except UserError as error:
        channel.send(Message(FAILED, {"error": str(error)}))
    except torch.OutOfMemoryError as error:  # again, it would happen again
        text = f"csx {start.index} has not enough device memory: {str(error).splitlines()[0]}"
        channel.send(Message(FAILED, {"error": f"{text}; give a smaller --micro_batch_size, or fewer workers per GPU"}))
    os._exit(0)  # at once: threads that wait for the connection must not hold the process


def _answer(device: Device, question: DeviceQuestion | FootprintQuestion) -> dict[str, Any]:
    if isinstance(question, DeviceQuestion):
        free, total = device.memory()
        return {"free_bytes": free, "total_bytes": total}
    footprint = device.footprint(
        on_device(question.graph.unpacked(), device.where),
        question.num_micro_batches,
        NUM_SLOTS,
        recompute=question.recompute,
        num_parts=question.num_parts,
    )
    return dataclasses.asdict(footprint)


def _eval_graph_from(objects: Connection, where: torch.device) -> Callable[[], Graph]:
    """The graph is received when it is first asked for."""
    return functools.cache(lambda: on_device(objects.recv().unpacked(), where))


def _die_with(parent: int) -> None:
    """The kernel ends this process when the parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os._exit(1)


def _leave(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def _environment(config: PoolConfig) -> Iterator[None]:
    """Threads of workers that have to share cores sleep while they wait, instead of spinning."""
    cores = len(os.sched_getaffinity(0))
    # torch.compile in a worker starts no processes of its own, which a killed worker would leave behind.
    settings = {"OMP_NUM_THREADS": str(config.threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
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
