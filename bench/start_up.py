"""How long `openwafer serve MODEL` takes to its first token, as a client sees it.

    python bench/start_up.py [--model smollm2] [--repeats 3]

`first start` compiles the kernels into an empty cache, `next start` finds them there. The floor is a process that
imports PyTorch and answers nothing. Seconds are wall time; processor time is beside them, since other work on the
machine adds to the first only. The target is 10 s on 2 cores.
"""

import argparse
import json
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from _child import child_environment

from openwafer.registry import cache_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        for entry in cache_dir().iterdir():  # all but the kernels
            if entry.name != "kernels":
                (cache / entry.name).symlink_to(entry)
        environment = child_environment(OPENWAFER_CACHE=folder)
        report("first start", [measured(lambda: first_token(args.model, environment))])
        report("next start", [measured(lambda: first_token(args.model, environment)) for _ in range(args.repeats)])
    imports = [sys.executable, "-c", "import torch"]
    report("floor: import torch", [measured(lambda: subprocess.run(imports, check=True)) for _ in range(args.repeats)])


def first_token(model: str, environment: dict[str, str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "openwafer", "serve", model, "--port", str(port)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as server:
        try:
            name = ask(server, port, "/v1/models")["data"][0]["id"]
            body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
            ask(server, port, "/v1/chat/completions", body)
        finally:
            server.send_signal(signal.SIGKILL)


def ask(server: subprocess.Popen, port: int, path: str, body: dict | None = None) -> dict:
    """Again and again until the server is there and has its model."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None:
                sys.exit(f"the server ended with {server.returncode}")
            time.sleep(0.05)


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, processor seconds of the processes that ended meanwhile)."""
    began, before = time.perf_counter(), children_cpu()
    run()
    return time.perf_counter() - began, children_cpu() - before


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(name: str, results: list[tuple[float, float]]) -> None:
    wall, cpu = (statistics.median(column) for column in zip(*results, strict=True))
    print(f"{name:22} {wall:6.2f} s   {cpu:6.2f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
