"""Hosts on one machine: network namespaces joined by a switch, each with a link that can be cut or made lossy."""

import os
import subprocess
from collections.abc import Sequence
from typing import Any

NETWORK = "10.77.0"
INTERFACE = "eth0"


class Hosts:
    """`count` hosts with addresses 10.77.0.1 and up on one bridge; a context manager."""

    def __init__(self, count: int) -> None:
        self._tag = f"ow{os.getpid()}"
        self.names = [f"{self._tag}h{index}" for index in range(count)]

    @property
    def switch(self) -> str:
        return f"{self._tag}sw"

    def __enter__(self) -> "Hosts":
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for index, name in enumerate(self.names):
            ip("netns", "add", name)
            ip(
                "link",
                "add",
                INTERFACE,
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"port{index}",
                "netns",
                self.switch,
            )
            ip("-n", self.switch, "link", "set", f"port{index}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """A process on a host; its first process is `ip`, which becomes the command."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], text=True, **options)

    def cut(self, host: int) -> None:
        ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def lose_half(self, host: int) -> None:
        """Every other packet to and from a host is dropped at random."""
        for chain in ("INPUT", "OUTPUT"):
            rule = ["-A", chain, "-i" if chain == "INPUT" else "-o", INTERFACE]
            rule += ["-m", "statistic", "--mode", "random", "--probability", "0.5", "-j", "DROP"]
            subprocess.run(["ip", "netns", "exec", self.names[host], "iptables", *rule], check=True, timeout=120)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=120)


def why_not() -> str | None:
    """Why hosts cannot be made here, or None."""
    try:
        with Hosts(1):
            return None
    except FileNotFoundError:
        return "network namespaces need the command `ip` (package iproute2)"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
