"""A model over two processes beside one process, and a model that is streamed from flash beside the disk itself.

    python bench/pipeline_cpu.py [--model smollm2] [--rounds 3] [--json]

One process with two threads, two stages with one thread each, and two ranks with one thread each (started as torchrun
starts them, and joined by torch.distributed) take turns in the same run: one long prompt; 1 and 8 users, greedy, all
decoding. The machine may be shared, so the best round counts, and processor time per token stands
beside it. With two cores and 8 users both have the same arithmetic to do; what stages win is memory per process.

Streaming: the same model with half of its weights' size as `dram`. Decoding reads the rest once per step; the rate
is beside that of two threads that only read the same files, with direct I/O.

Hop: a message of 8 rows to another process and back, over the pipes of the pipeline and over torch.distributed (gloo).
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _child import ROOT, child_environment

sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from openwafer.serve.engine import LocalEngine
    from openwafer.serve.pipeline.cluster import Cluster

_TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="pulled name, folder or GGUF file")
    parser.add_argument("--tokens", type=int, default=48, help="tokens decoded by each user")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flash", type=Path, help="folder for the streamed weights (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: dict[str, Any] = {"model": args.model} | stages(args) | streaming(args) | {"hop": hop()}
    print(json.dumps(rounded(results), indent=1) if args.json else shown(results))


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


COMMON: dict[str, Any] = {"max_running": 16, "kv_cache": 256 << 20}


def opened(model: str, cluster: "Cluster | None" = None, **options: Any) -> "tuple[LocalEngine, list[int]]":
    """An engine, and the processes of this one that compute for it."""
    from openwafer.serve.engine import EngineConfig, LocalEngine, open_engine

    engine, _, _ = open_engine(model, EngineConfig(**COMMON | options), cluster)
    assert isinstance(engine, LocalEngine)
    runner: Any = engine._runner
    return engine, runner.stages.process_ids if hasattr(runner, "stages") else [os.getpid()]


@contextlib.contextmanager
def ranks(model: str) -> "Iterator[tuple[Cluster, int]]":
    """This process as rank 0, and the process that is rank 1."""
    from openwafer import __version__
    from openwafer.serve.engine import EngineConfig
    from openwafer.serve.pipeline.cluster import Cluster
    from openwafer.serve.pipeline.members import meet

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= world | {"RANK": "0", "LOCAL_RANK": "0"}
    options: dict[str, Any] = COMMON | {"num_threads": 2}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = child_environment(RANK="1", LOCAL_RANK="1")
    other = subprocess.Popen([sys.executable, "-m", "openwafer", "serve", model, *flags], env=environment)
    try:
        with Cluster(meet(model, EngineConfig(**options, num_csx=2), __version__)) as cluster:
            yield cluster, other.pid
        other.wait(30)
    finally:
        other.kill()
        other.wait()


def stages(args: argparse.Namespace) -> dict[str, Any]:
    with ranks(args.model) as (cluster, other_pid):
        joined, pids = opened(args.model, cluster, num_threads=2, num_csx=2)
        kinds = {
            "1 process x 2 threads": opened(args.model, num_threads=2),
            "2 stages x 1 thread": opened(args.model, num_threads=2, num_csx=2),
            "2 ranks x 1 thread": (joined, [*pids, other_pid]),
        }
        return compared(args, kinds)


def compared(args: argparse.Namespace, kinds: "dict[str, tuple[LocalEngine, list[int]]]") -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    prompts = dict.fromkeys(kinds, 0.0)
    for number in range(args.rounds):
        for kind, (engine, _) in kinds.items():
            prompts[kind] = max(prompts[kind], prompt_rate(engine, args.prompt, number))
        for users in (1, 8):
            for kind, (engine, pids) in kinds.items():
                found = decoded(engine, pids, users, args.tokens, f"{number}-{kind}")
                name = f"{kind}, {users} users" if users > 1 else f"{kind}, 1 user"
                best = rows.get(name)
                if best is None or found["tokens_per_s"] > best["tokens_per_s"]:
                    rows[name] = found
    ratios = {
        users: rows[f"2 ranks x 1 thread, {users}"]["tokens_per_s"]
        / rows[f"2 stages x 1 thread, {users}"]["tokens_per_s"]
        for users in ("1 user", "8 users")
    }
    memory = {kind: [private_bytes(pid) >> 20 for pid in pids] for kind, (_, pids) in kinds.items()}
    for engine, _ in kinds.values():
        engine.close()
    return {
        "prompt_tokens_per_s": prompts,
        "decoding": rows,
        "ranks_of_stages": ratios,
        "memory_mib": memory,
        "weights_mib": weights_mib(args.model),
    }


def prompt_rate(engine: "LocalEngine", num_tokens: int, number: int) -> float:
    """Tokens per second of one long prompt, to the first token of its answer; its pieces fill the stages."""
    from openwafer.serve.core import Request, Sampling

    prompt = tuple(100 + (31 * number + 7 * place) % 9000 for place in range(num_tokens))
    done = threading.Event()
    began = time.perf_counter()
    sampling = Sampling(max_tokens=1, temperature=0.0)
    engine.submit(Request(id=f"prompt-{number}", prompt=prompt, sampling=sampling), lambda event: done.set())
    done.wait()
    return num_tokens / (time.perf_counter() - began)


def decoded(engine: "LocalEngine", pids: list[int], users: int, tokens: int, name: str) -> dict[str, Any]:
    """Some users from their first token to the last one's end."""
    from openwafer.serve.core import Event, Request, Sampling

    left, started, done = users, 0, threading.Event()
    began = cpu = 0.0
    busy: tuple[float, ...] = ()
    lock = threading.Lock()

    def listener():
        is_new = True

        def on_event(event: Event) -> None:
            nonlocal left, started, began, cpu, busy, is_new
            with lock:
                if is_new and event.tokens:
                    is_new, started = False, started + 1
                    if started == users:  # all prompts are done
                        began, cpu, busy = time.perf_counter(), cpu_s(pids), engine.stats().stage_busy_s
                left -= event.finish_reason is not None
                if left == 0:
                    done.set()

        return on_event

    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    for user in range(users):
        prompt = (300 + user, *range(400, 415))
        engine.submit(Request(id=f"{name}-{user}", prompt=prompt, sampling=sampling), listener())
    done.wait()
    wall = time.perf_counter() - began
    count = users * (tokens - 1)
    after = engine.stats().stage_busy_s
    return {
        "tokens_per_s": count / wall,
        "cpu_ms_per_token": 1000 * (cpu_s(pids) - cpu) / count,
        "waits": [1 - (b - a) / wall for a, b in zip(busy, after, strict=True)],
    }


def cpu_s(pids: list[int]) -> float:
    """Processor time of these processes and of this one, which draws tokens or schedules."""
    total = 0
    for pid in {os.getpid(), *pids}:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICK


def private_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


def weights_mib(model: str) -> dict[str, list[int]]:
    from openwafer.models.load import open_model
    from openwafer.serve.engine import EngineConfig
    from openwafer.serve.inventory import take_inventory
    from openwafer.serve.stage_plan import plan_stages

    stored = open_model(model)
    inventory = take_inventory(stored, EngineConfig())
    return {
        f"{num_csx}": [
            inventory.total(plan.region) >> 20 for plan in plan_stages(stored, EngineConfig(num_csx=num_csx))
        ]
        for num_csx in (1, 2)
    }


def streaming(args: argparse.Namespace) -> dict[str, Any]:
    from openwafer.models.load import open_model
    from openwafer.serve.engine import EngineConfig
    from openwafer.serve.inventory import take_inventory
    from openwafer.serve.region import Region

    stored = open_model(args.model)
    total = take_inventory(stored, EngineConfig()).total(Region.whole(stored.config))
    cache = 16 << 20
    with tempfile.TemporaryDirectory(dir=args.flash) as folder:
        options: dict[str, Any] = {"num_threads": 2, "max_running": 8, "kv_cache": cache, "max_step_tokens": 64}
        engine, _ = opened(args.model, dram=total // 2 + cache, flash=Path(folder), **options)
        stream: Any = engine._runner._stream  # pyright: ignore[reportAttributeAccessIssue]
        best: dict[str, float] = {}
        for number in range(args.rounds):
            read, began, waited = stream.num_bytes_read, time.perf_counter(), stream.wait_s
            found = decoded(engine, [os.getpid()], 1, args.tokens, f"stream-{number}")
            wall = time.perf_counter() - began
            rate = (stream.num_bytes_read - read) / wall
            if rate > best.get("read_mb_per_s", 0.0) * 1e6:
                best = {
                    "tokens_per_s": found["tokens_per_s"],
                    "read_mb_per_s": rate / 1e6,
                    "waits_for_flash": (stream.wait_s - waited) / wall,
                }
        file_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        disk = disk_rate(Path(folder), file_bytes)
        engine.close()
    sizes = {"weights_mib": total >> 20, "on_flash_mib": file_bytes >> 20, "disk_mb_per_s": disk / 1e6}
    return {"streaming": best | sizes}


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Bytes per second of reading all files of a folder in pieces, as the stream does."""
    from openwafer.direct_io import aligned_bytes, bytes_of, opened, read_fully, rounded_up

    paths = sorted(path for path in folder.iterdir() if path.suffix == ".flash")

    def read(path: Path) -> None:
        buffer = bytes_of(aligned_bytes(rounded_up(path.stat().st_size)))
        with opened(path, os.O_RDONLY, direct=True) as descriptor:
            read_fully(descriptor, buffer, 0)

    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(read, paths))
        best = max(best, num_bytes / (time.perf_counter() - began))
    return best


def hop(num_rows: int = 8, width: int = 576, repeats: int = 200) -> dict[str, float]:
    """Microseconds of one way, the median of many there and back."""
    return {"pipe_us": _pipe_hop(num_rows * width, repeats), "gloo_us": _gloo_hop(num_rows * width, repeats)}


def _pipe_hop(size: int, repeats: int) -> float:
    import numpy as np

    from openwafer.serve.pipeline.pipe import Broken, Pipe

    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        ours.close()
        pipe = Pipe(theirs)
        try:
            while True:
                pipe.send([pipe.receive()])
        except Broken:
            os._exit(0)
    theirs.close()
    pipe, data = Pipe(ours), np.zeros(size, np.float32)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        pipe.send([data])
        pipe.receive()
        times.append(time.perf_counter() - began)
    pipe.close()
    os.waitpid(child, 0)
    return 1e6 * sorted(times)[repeats // 2] / 2


def _gloo_hop(size: int, repeats: int) -> float:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        process = mp.get_context("spawn").Process(target=_gloo_side, args=(1, folder, size, repeats))
        process.start()
        median = _gloo_side(0, folder, size, repeats)
        process.join()
    return median


def _gloo_side(rank: int, folder: str, size: int, repeats: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    data, times = torch.zeros(size), []
    for _ in range(repeats):
        began = time.perf_counter()
        if rank == 0:
            dist.send(data, 1)
            dist.recv(data, 1)
        else:
            dist.recv(data, 0)
            dist.send(data, 0)
        times.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return 1e6 * sorted(times)[repeats // 2] / 2


def shown(results: dict[str, Any]) -> str:
    lines = [f"{results['model']}, decoding{'':>24}tokens/s   CPU ms/token   each stage waits"]
    for name, row in results["decoding"].items():
        waits = " ".join(f"{100 * share:4.0f} %" for share in row["waits"])
        lines.append(f"  {name:36}{row['tokens_per_s']:12.1f}{row['cpu_ms_per_token']:15.1f}   {waits}")
    for users, ratio in results["ranks_of_stages"].items():
        lines.append(f"  {f'ranks against stages, {users}':36}{ratio:12.2f} x")
    for kind, rate in results["prompt_tokens_per_s"].items():
        lines.append(f"  {f'{kind}, one long prompt':36}{rate:12.1f}")
    for kind, sizes in results["memory_mib"].items():
        lines.append(f"  {kind:36} private memory of each process, MiB: {', '.join(map(str, sizes))}")
    for count, sizes in results["weights_mib"].items():
        lines.append(f"  {f'in {count}':36} of which weights, MiB: {', '.join(map(str, sizes))}")
    row = results["streaming"]
    lines.append(
        f"streaming {row['on_flash_mib']} of {row['weights_mib']} MiB: {row['tokens_per_s']:.1f} tokens/s, "
        f"{row['read_mb_per_s']:.0f} MB/s read (disk alone {row['disk_mb_per_s']:.0f} MB/s), "
        f"{100 * row['waits_for_flash']:.0f} % of the time waiting for it"
    )
    row = results["hop"]
    lines.append(f"8 rows to the next process: {row['pipe_us']:.0f} us over a pipe, {row['gloo_us']:.0f} us over gloo")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
