"""One rank of a run on many hosts, as torchrun starts it: the first store, another store, or a worker.

Whatever goes wrong on any rank ends all of them within the set time, with a message that names the rank; the
elastic launcher then starts them again, and they go on from the last checkpoint.
"""

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from openwafer import checkpoint
from openwafer.csx.worker import Worker
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.graph.deferred import deferred
from openwafer.memoryx.config import MemoryConfig
from openwafer.memoryx.groups import with_groups
from openwafer.memoryx.optimizer import Optimizer, make_optimizer
from openwafer.memoryx.placement import Placement, open_tiers
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import Key, Tier
from openwafer.models.build import build
from openwafer.swarmx.channel import FAILED, LOST, Channel, Mailbox, RankLost
from openwafer.swarmx.message import Message
from openwafer.swarmx.network import NetworkHub, NetworkPort
from openwafer.swarmx.share import check_shares
from openwafer.swarmx.stripe import Stripe, check_stripes, stripes
from openwafer.swarmx.transfer import GroupConnection
from openwafer.swarmx.waits import Waits
from openwafer.swarmx.world import World, join
from openwafer.train.csx_process import STOP, Csx
from openwafer.train.followers import Follower, Followers
from openwafer.train.job import Job, JobConfig, JobResult
from openwafer.train.swarm import Swarm, SwarmLink
from openwafer.train.text_model import capture_text_model, context_of

_TELL_S = 2.0  # for telling the other ranks why this one leaves
_LOST_EXIT = 75  # the exit status of a rank that gives up because another is gone: try again


class Wires:
    """The channels of one rank: the first store has one to every other rank, the others have one to it."""

    def __init__(self, world: World, timeout_s: float, status: Callable[[], dict[str, Any]] = dict) -> None:
        self.world = world
        self.mailbox = Mailbox()
        self._lock = threading.Lock()
        self._is_over = False
        peers = range(1, len(world.hosts)) if world.rank == 0 else range(1)
        self.channels = {
            rank: Channel(
                GroupConnection(world.control, rank),
                self.mailbox,
                rank=rank,
                name=world.name(rank),
                timeout_s=timeout_s,
                status=status,
                on_lost=self.leave,
            )
            for rank in peers
        }

    def leave(self, error: RankLost) -> None:
        """Say which rank was lost, here and to the others, and end this process."""
        with self._lock:
            if self._is_over:
                return
            print(f"{self.world.name(self.world.rank)}: {error}", file=sys.stderr, flush=True)
            self._tell_all(Message(LOST, {"who": error.who, "why": error.why}))
            os._exit(_LOST_EXIT)

    def fail(self, error: UserError) -> None:
        """An error of our own ends the run everywhere."""
        self._tell_all(Message(FAILED, {"error": str(error)}))

    def _tell_all(self, message: Message) -> None:
        """At once and for a short time only: some may be gone."""
        sends = [channel.send for channel in self.channels.values()]
        threads = [threading.Thread(target=_quietly, args=(send, message), daemon=True) for send in sends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TELL_S)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
        for channel in self.channels.values():
            channel.stop()


def _quietly(send: Callable[[Message], None], message: Message) -> None:
    try:
        send(message)
    except (UserError, OSError, RuntimeError, ValueError):
        return  # that rank is gone too


class NetworkWorkers:
    """What the job of a store needs; see `workers.Workers`."""

    def __init__(self, world: World, wires: Wires, seed: int) -> None:
        self.world = world
        self.wires = wires
        self.num_csx = world.num_csx
        self.threads = world.verdict["threads"]
        self._parts: list[Stripe] = []

    def latest(self, model_dir: Path) -> Path | None:
        name = self.world.verdict["checkpoint"]
        return None if name is None else model_dir / "checkpoints" / name

    def part(self, graph: Graph, optimizer: Optimizer) -> Stripe:
        check_stripes(graph, self.world.num_memoryx)
        self._parts = stripes(graph, optimizer, self.world.num_memoryx)
        return self._parts[self.world.rank]

    def open_tiers(self, placement: Placement, config: MemoryConfig) -> dict[Key, Tier]:
        return open_tiers(placement, config)

    def attach(
        self, graph: Graph, store: Store, seed: int, options: Mapping[str, Any]
    ) -> tuple[SwarmLink, Swarm | Follower]:
        world, wires, link = self.world, self.wires, SwarmLink(store)
        if world.rank > 0:
            hub = NetworkHub(world, store, wires.mailbox, link.updater.wait, [])
            return link, Follower(world, hub, wires.mailbox, wires.channels[0])
        csx = [wires.channels[rank] for rank in world.csx_ranks]
        hub = NetworkHub(world, store, wires.mailbox, link.updater.wait, csx)
        for channel in csx:
            wires.mailbox.get(channel.peer.rank, "ready")
        others = [wires.channels[rank] for rank in range(1, world.num_memoryx)]
        followers = Followers(world, graph, self._parts, wires.mailbox, others) if others else None
        return link, Swarm(graph, hub, followers=followers)


def run_rank(config: JobConfig) -> JobResult | None:
    """This rank's part of the run; only the first store has a result."""
    train, swarmx = config.train, config.swarmx
    if swarmx.csx_threads is not None:
        torch.set_num_threads(swarmx.csx_threads)
    swarmx.check(train.num_csx)
    world = join(swarmx, train.num_csx, config.params, functools.partial(_decide, config))
    waits = Waits()
    wires = Wires(world, swarmx.lost_after, waits.status)
    status = [1]  # the exit status; filled below
    atexit.register(lambda: _end(status[0]))
    try:
        result = _hold(config, world, wires) if world.is_store else _compute(config, world, wires, waits)
        status[0] = 0
    except RankLost as error:
        wires.leave(error)
        raise
    except UserError as error:
        wires.fail(error)
        status[0] = 2
        raise
    finally:
        wires.close()
    return result


def _decide(config: JobConfig, num_csx: int) -> dict[str, Any]:
    """What all ranks go by; a mistake is found here, before anything starts."""
    check_shares(config.train.num_micro_batches, num_csx)
    context_of(config.model, config.data)
    newest = checkpoint.latest(config.train.model_dir)
    if num_csx < config.train.num_csx:
        print(f"going on with {num_csx} of {config.train.num_csx} workers", file=sys.stderr, flush=True)
    return {"checkpoint": None if newest is None else newest.name, "threads": torch.get_num_threads()}


def _hold(config: JobConfig, world: World, wires: Wires) -> JobResult | None:
    """A store. The first runs the job, the others do as it says."""
    job = Job(config, NetworkWorkers(world, wires, config.train.seed))
    if world.rank == 0:
        print("all here: " + ", ".join(map(world.name, range(len(world.hosts)))), file=sys.stderr, flush=True)
        result = job.run()
        for channel in wires.channels.values():
            channel.send(Message("command", {"do": STOP}))
        return result
    follower = job.engine.swarm
    assert isinstance(follower, Follower)
    while (command := follower.command())["do"] != STOP:
        match command["do"]:
            case "step":
                job.engine.step([])
            case "evaluate":
                follower.evaluate()
            case "save":
                job.engine.link.drain()
                follower.send_pieces(job.engine.store)
    return None


def _compute(config: JobConfig, world: World, wires: Wires, waits: Waits) -> None:
    train = config.train
    context = context_of(config.model, config.data)
    with deferred():
        module = build(config.model)
    capture = functools.partial(capture_text_model, module, train.micro_batch, context)
    graph = with_groups(capture(training=True), config.optimizer.groups)
    parts = stripes(graph, make_optimizer(config.optimizer), world.num_memoryx)
    port = NetworkPort(world, graph, parts, wires.mailbox, wires.channels[0], wire=torch.float32, waits=waits)
    worker = Worker(graph, train.seed, recompute=train.recompute)
    port.tell(Message("ready"))
    Csx(port, worker, functools.cache(lambda: capture(training=False))).serve()


def _end(status: int) -> NoReturn:
    """At once: torch.distributed aborts a process that ends while threads wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
