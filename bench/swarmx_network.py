"""SwarmX between hosts without computing: weights out and gradients back, against a plain socket on the same link.

    python bench/swarmx_network.py [--megabytes 32] [--units 8] [--rounds 5]     (as root: it makes two hosts)

Two network namespaces joined by a veth link. A round is a forward pass (every Unit out) and a backward pass (every
Unit out, its gradients back, both at once). The plain socket moves the same bytes in the same pattern with sendall
and recv_into, one connection per direction. Both run in the same minute, taking turns.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openwafer.graph import capture
from openwafer.graph.deferred import deferred
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.swarmx.config import SwarmConfig
from openwafer.swarmx.message import Message
from openwafer.swarmx.network import NetworkHub
from openwafer.swarmx.network_port import NetworkPort
from openwafer.swarmx.stripe import stripes
from openwafer.swarmx.tree import nodes_of
from openwafer.swarmx.waits import Waits
from openwafer.swarmx.world import join
from openwafer.train.network_workers import Wires

ADDRESSES = ("10.78.0.1", "10.78.0.2")
PORT = 29877
TOTAL = 2  # micro-batches, of one worker: one part per weight


class Layers(nn.Module):
    def __init__(self, units: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def graph_of(args: argparse.Namespace) -> Any:
    width = int((args.megabytes * 2**20 / 4) ** 0.5) // 16 * 16
    with deferred():
        module = Layers(args.units, width)
    return capture(module.train(), (torch.zeros(1, width, device="meta"),))


def swarmx_rank(args: argparse.Namespace) -> None:
    """One rank: the store measures, the worker answers."""
    world = join(SwarmConfig(), 1, {}, "bench", lambda num_csx: {})
    wires = Wires(world, 60.0)
    graph = graph_of(args)
    if world.rank == 1:
        port = NetworkPort(
            world, graph, stripes(graph, make_optimizer(OptimizerConfig()), 1), wires.mailbox, wires.channels[0],
            wire=torch.float32, waits=Waits(),
        )  # fmt: skip
        port.expect(TOTAL, range(TOTAL))
        (node,) = nodes_of(TOTAL, range(TOTAL))
        gradients = {name: {node: torch.ones(weight.spec.shape)} for name, weight in graph.weights.items()}
        port.tell(Message("ready"))
        for _ in range(args.rounds):
            for _ in port.stream(graph.units):
                pass
            for unit, _ in port.stream(reversed(graph.units)):
                port.send(unit, {name: gradients[name] for name in unit.weights})
            port.flush()
        port.hear("over")
        os._exit(0)
    optimizer, tier = make_optimizer(OptimizerConfig()), DramTier()
    store = Store(graph, optimizer, {spec.key: tier for spec in fields(graph, optimizer)})
    hub = NetworkHub(world, store, wires.mailbox, lambda unit: None, [wires.channels[1]])
    hub.hear(0, "ready")
    times = []
    for _ in range(args.rounds):
        began = time.perf_counter()
        hub.cast(graph.units)
        hub.expect(TOTAL)
        hub.cast(graph.units[::-1])
        for unit in reversed(graph.units):
            with hub.collect(unit):
                pass
        times.append(time.perf_counter() - began)
    moved = (hub.traffic.broadcast_bytes + hub.traffic.reduced_bytes) / args.rounds
    print(json.dumps({"bytes": moved, "seconds": times}), flush=True)
    hub.tell(0, Message("over"))
    time.sleep(0.5)
    os._exit(0)


def socket_rank(args: argparse.Namespace) -> None:
    """The same bytes: one way, then both ways at once, on two connections."""
    size = args.megabytes * 2**20
    if args.rank == 1:
        with socket.create_server((ADDRESSES[1], PORT)) as server:
            print("listening", flush=True)
            out, back = server.accept()[0], server.accept()[0]
        for _ in range(args.rounds):
            receive(out, size * args.units)
            both(lambda: receive(out, size * args.units), lambda: send(back, size, args.units))
            back.recv(1)
        return
    out, back = (socket.create_connection((ADDRESSES[1], PORT)) for _ in range(2))
    times = []
    for _ in range(args.rounds):
        began = time.perf_counter()
        send(out, size, args.units)
        both(lambda: send(out, size, args.units), lambda: receive(back, size * args.units))
        times.append(time.perf_counter() - began)
        back.sendall(b"x")
    print(json.dumps({"bytes": 3 * size * args.units, "seconds": times}), flush=True)


def send(connection: socket.socket, size: int, count: int) -> None:
    data = memoryview(bytearray(size))
    for _ in range(count):
        connection.sendall(data)


def receive(connection: socket.socket, size: int) -> None:
    memory = memoryview(bytearray(4 << 20))
    while size:
        size -= connection.recv_into(memory[: min(size, len(memory))])


def both(first: Callable[[], None], second: Callable[[], None]) -> None:
    thread = threading.Thread(target=first)
    thread.start()
    second()
    thread.join()


def run(args: argparse.Namespace, role: str, names: list[str]) -> dict[str, Any]:
    flags = ["--megabytes", str(args.megabytes), "--units", str(args.units), "--rounds", str(args.rounds)]
    processes = []
    for rank in (1, 0):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0]}
        environment |= {"MASTER_PORT": str(PORT + 1), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", names[rank], sys.executable, str(Path(__file__).resolve())]
        command += ["--role", role, "--rank", str(rank), *flags]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        if role == "socket" and rank == 1:
            processes[0].stdout.readline()  # type: ignore[union-attr]
    output, _ = processes[1].communicate(timeout=300)
    processes[0].communicate(timeout=60)
    found = json.loads(output.splitlines()[-1])
    rate = found["bytes"] / statistics.median(found["seconds"][1:])
    return {"GB_per_s": rate / 1e9, "best_GB_per_s": found["bytes"] / min(found["seconds"]) / 1e9}


def iperf3(names: list[str]) -> dict[str, float] | None:
    """One way, for three seconds, where it is installed."""
    if shutil.which("iperf3") is None:
        return None
    inside = [["ip", "netns", "exec", name, "iperf3"] for name in names]
    with subprocess.Popen([*inside[1], "-s", "-1"], stdout=subprocess.DEVNULL) as server:
        time.sleep(0.5)
        command = [*inside[0], "-c", ADDRESSES[1], "-t", "3", "-J"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        server.wait(timeout=30)
    return {"GB_per_s": json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8e9}


def hosts(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    link = ["type", "veth", "peer", "name", "eth0", "netns", names[1]]
    subprocess.run(["ip", "link", "add", "eth0", "netns", names[0], *link], check=True)
    for name, address in zip(names, ADDRESSES, strict=True):
        subprocess.run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0"], check=True)
        for device in ("eth0", "lo"):
            subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=32, help="size of a Unit")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", choices=("swarmx", "socket"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        return {"swarmx": swarmx_rank, "socket": socket_rank}[args.role](args)
    names = [f"owbench{os.getpid()}{side}" for side in "ab"]
    try:
        hosts(names)
        turns = [{role: run(args, role, names) for role in ("socket", "swarmx")} for _ in range(2)]
        found: dict[str, Any] = {
            role: max((turn[role] for turn in turns), key=lambda one: one["GB_per_s"]) for role in turns[0]
        }
        found["iperf3"] = iperf3(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
    found["swarmx_of_socket"] = found["swarmx"]["GB_per_s"] / found["socket"]["GB_per_s"]
    found["swarmx_of_socket_best"] = found["swarmx"]["best_GB_per_s"] / found["socket"]["best_GB_per_s"]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
