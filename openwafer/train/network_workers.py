"""The ranks on other hosts as a store's job needs them, and the wires over which ranks speak."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import Placement, open_tiers
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import Key, Tier
from openwafer.swarmx.channel import FAILED, LOST, Channel, Mailbox, RankLost, tell_all
from openwafer.swarmx.message import Message
from openwafer.swarmx.network import NetworkHub
from openwafer.swarmx.reach import is_reached
from openwafer.swarmx.stripe import Stripe, check_stripes, stripes
from openwafer.swarmx.transfer import GroupConnection
from openwafer.swarmx.world import World
from openwafer.train.followers import Follower, Followers
from openwafer.train.swarm import Swarm, SwarmLink

_LOST_EXIT = 75  # the exit status of a rank that gives up because another is gone: try again


class Wires:
    """The channels of one rank: the first store has one to every other rank, the others have one to it."""

    def __init__(self, world: World, timeout_s: float, status: Callable[[], dict[str, Any]] = dict) -> None:
        self.world = world
        self.mailbox = Mailbox()
        self._timeout_s = timeout_s
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
                on_quiet=None if world.rank == 0 else self._look_at_link,
            )
            for rank in peers
        }

    def leave(self, error: RankLost) -> None:
        """Say which rank was lost, here and to the others, and end this process."""
        with self._lock:
            if self._is_over:
                return
            print(f"{self.world.name(self.world.rank)}: {error}", file=sys.stderr, flush=True)
            tell_all(self.channels.values(), Message(LOST, {"who": error.who, "why": error.why}))
            os._exit(_LOST_EXIT)

    def _look_at_link(self) -> None:
        """Rank 0 is silent, and will give us up if it hears nothing either. If it is the link, this host goes at once,
        and its launcher too: that would come back over the same link while the others gather, and they would wait for
        its answers for minutes; or it would tell them that the job has failed."""
        address, port, within_s = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self._timeout_s / 4
        if is_reached(address, port, within_s):
            return
        with self._lock:
            if self._is_over:
                return
            print(
                f"{self.world.name(self.world.rank)}: {self.world.name(0)} was lost: its host {address} does not "
                f"answer within {within_s:g} s, so the link is broken; this host's launcher is ended, and the others "
                "go on without it: start it again when the link is whole",
                file=sys.stderr,
                flush=True,
            )
            if "TORCHELASTIC_RUN_ID" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
            os._exit(_LOST_EXIT)

    def fail(self, error: UserError) -> None:
        """An error of our own ends the run everywhere."""
        tell_all(self.channels.values(), Message(FAILED, {"error": str(error)}))

    def close(self) -> None:
        with self._lock:
            self._is_over = True
        for channel in self.channels.values():
            channel.stop()


class NetworkWorkers:
    """What the job of a store needs; see `assembly.Workers`. `resumed` is the checkpoint that all go on from."""

    def __init__(self, world: World, wires: Wires, resumed: Path | None) -> None:
        self.world = world
        self.wires = wires
        self.resumed = resumed
        self.num_csx = world.num_csx
        self.threads = world.verdict["threads"]
        self._parts: list[Stripe] = []
        self._link: SwarmLink | None = None

    def part(self, graph: Graph, config: OptimizerConfig) -> Stripe:
        """What this store holds of the graph."""
        check_stripes(graph, self.world.num_memoryx)
        self._parts = stripes(graph, make_optimizer(config), self.world.num_memoryx)
        return self._parts[self.world.rank]

    def open_tiers(self, placement: Placement, config: MemoryConfig) -> dict[Key, Tier]:
        return open_tiers(placement, config)

    def attach(
        self, graph: Graph, store: Store, seed: int, options: Mapping[str, Any]
    ) -> tuple[SwarmLink, Swarm | Follower]:
        world, wires, link = self.world, self.wires, SwarmLink(store)
        self._link = link
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

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
