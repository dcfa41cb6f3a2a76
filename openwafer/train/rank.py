"""One rank of a run on many hosts, as torchrun starts it: the first store, another store, or a worker.

Whatever goes wrong on any rank ends all of them within the set time, with a message that names the rank; the
elastic launcher then starts them again, and they go on from the last checkpoint.
"""

import atexit
import functools
import os
import sys
from typing import Any, NoReturn

import torch

from openwafer import checkpoint
from openwafer.csx.staging import StagedPort
from openwafer.csx.worker import Worker
from openwafer.errors import UserError
from openwafer.graph.compiled import compiled
from openwafer.graph.deferred import deferred
from openwafer.memoryx.groups import with_groups
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.models.build import build
from openwafer.swarmx.channel import RankLost
from openwafer.swarmx.message import Message
from openwafer.swarmx.network_port import NetworkPort
from openwafer.swarmx.share import check_shares
from openwafer.swarmx.stripe import stripes
from openwafer.swarmx.waits import Waits
from openwafer.swarmx.world import World, join
from openwafer.train.csx_process import STOP, Csx
from openwafer.train.followers import Follower
from openwafer.train.job import Job, JobConfig, JobResult
from openwafer.train.last_words import stay_after_sigterm
from openwafer.train.model_dir import only_run
from openwafer.train.network_workers import NetworkWorkers, Wires
from openwafer.train.rank_device import RankDevice
from openwafer.train.streamed import on_device
from openwafer.train.text_model import DTYPES, capture_text_model, context_of


def run_rank(config: JobConfig) -> JobResult | None:
    """This rank's part of the run; only the first store has a result."""
    train, swarmx = config.train, config.swarmx
    if swarmx.csx_threads is not None:
        torch.set_num_threads(swarmx.csx_threads)
    swarmx.check(train.num_csx)
    device, trouble = None, None
    if train.device == "cuda":
        try:
            device = RankDevice.of_this_rank(swarmx.num_memoryx, train.device_memory)
        except UserError as error:
            trouble = str(error)
    world = join(swarmx, train.num_csx, config.params, _version(), functools.partial(_decide, config), trouble)
    stay_after_sigterm()
    waits = Waits()
    wires = Wires(world, swarmx.lost_after, waits.status)
    status = [1]  # the exit status; filled below
    atexit.register(lambda: _end(status[0]))
    try:
        result = _hold(config, world, wires) if world.is_store else _compute(config, world, wires, waits, device)
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


def _version() -> str:
    import openwafer

    return openwafer.__version__


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
    name = world.verdict["checkpoint"]
    resumed = None if name is None else config.train.model_dir / "checkpoints" / name
    workers = NetworkWorkers(world, wires, resumed)
    if world.rank > 0:
        _follow(Job(config, workers))
        return None
    with only_run(config.train):
        job = Job(config, workers)
        print("all here: " + ", ".join(map(world.name, range(len(world.hosts)))), file=sys.stderr, flush=True)
        result = job.run()
        for channel in wires.channels.values():
            channel.send(Message("command", {"do": STOP}))
        return result


def _follow(job: Job) -> None:
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
    follower.finish()


def _compute(config: JobConfig, world: World, wires: Wires, waits: Waits, device: RankDevice | None) -> None:
    train = config.train
    where = torch.device("cpu") if device is None else device.where
    context = context_of(config.model, config.data)
    with deferred():
        module = build(config.model)
    dtype = DTYPES[train.precision]
    capture = functools.partial(capture_text_model, module, train.micro_batch, context, dtype)
    graph = with_groups(capture(training=True), config.optimizer.groups)
    if train.compile:
        graph = compiled(graph, where)
    graph = on_device(graph, where)
    parts = stripes(graph, make_optimizer(config.optimizer), world.num_memoryx)
    memory = {} if device is None else {"allocate": device.host_memory}
    wire = dtype or torch.float32
    port = NetworkPort(world, graph, parts, wires.mailbox, wires.channels[0], wire=wire, waits=waits, **memory)
    if device is not None:
        device.reserve(graph, train.num_micro_batches, world.num_csx, recompute=train.recompute)
        port = StagedPort(port, device.device)
    worker = Worker(graph, train.seed, recompute=train.recompute)
    port.tell(Message("ready"))
    try:
        Csx(port, worker, functools.cache(lambda: on_device(capture(training=False), where))).serve()
    except torch.OutOfMemoryError as error:  # again, it would happen again
        raise UserError(
            f"{world.name(world.rank)} has not enough device memory: {str(error).splitlines()[0]}; give a smaller "
            "--micro_batch_size, or fewer workers per GPU"
        ) from None


def _end(status: int) -> NoReturn:
    """At once: torch.distributed aborts a process that ends while threads wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
