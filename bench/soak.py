"""Half an hour of bad manners: many clients, random cancels, bad bodies; then everything must be free again.

    python bench/soak.py [--minutes 30] [--clients 50] [--burst 0] [--model smollm2] [--out FILE.json]

Without --model the engine computes nothing. Every client picks one of: a whole answer, a stream, a stream it
leaves in the middle, a JSON answer, a body that is wrong. `unexpected` counts answers that the request did not
ask for; it must be 0. Memory is that of the server process, sampled each second: the median of the last tenth
must not be more than 5 % above that of the second tenth. --burst N first opens N requests at once.
"""

import argparse
import asyncio
import collections
import json
import multiprocessing
import os
import random
import re
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _null_server import null_server

CHAT = "/v1/chat/completions"
BAD = [
    b"",
    b"{",
    b"\xff" * 100,
    b"[" * 10_000,
    json.dumps({"model": "null", "messages": []}).encode(),
    json.dumps({"model": "other", "messages": [{"role": "user", "content": "x"}]}).encode(),
    json.dumps({"model": "null", "messages": [{"role": "user", "content": "x"}], "n": 10**9}).encode(),
    json.dumps({"model": "null", "messages": [{"role": "user", "content": "x"}], "surprise": 1}).encode(),
]


def serve(pipe: Any, model: str | None) -> None:
    with null_server(0.002, model, max_context=4096) as server:
        pipe.send(server.address[1])
        server.run()


def chat_body(rng: random.Random, **fields: Any) -> bytes:
    content = "word " * rng.randint(1, 60)
    body = {"model": "null", "messages": [{"role": "user", "content": content}], "max_tokens": rng.randint(1, 60)}
    return json.dumps({**body, **fields}).encode()


async def post(port: int, body: bytes, leave_after: int | None = None) -> tuple[int, bytes]:
    """(status, what came); with `leave_after` the connection is cut after so many bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        await writer.drain()
        received = b""
        while piece := await reader.read(65536):
            received += piece
            if leave_after is not None and len(received) >= leave_after:
                writer.transport.abort()
                break
        return int(received[9:12] or b"0"), received
    finally:
        writer.close()


async def one_request(port: int, rng: random.Random) -> tuple[str, bool]:
    """(what was tried, whether the answer was right)."""
    kind = rng.choice(["whole", "stream", "leave", "leave", "json", "bad"])
    if kind == "whole":
        status, text = await post(port, chat_body(rng))
        return kind, status == 200 and b'"finish_reason":' in text
    if kind == "stream":
        status, text = await post(port, chat_body(rng, stream=True))
        return kind, status == 200 and b"data: [DONE]" in text
    if kind == "leave":
        status, _ = await post(port, chat_body(rng, stream=True, n=rng.randint(1, 3)), rng.randint(1, 5000))
        return kind, status in (200, 0)
    if kind == "json":
        schema = {"type": "object", "properties": {f"k{rng.randint(0, 500)}": {"type": "integer"}}}
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        status, _ = await post(port, chat_body(rng, response_format=wanted))
        return kind, status == 200
    status, text = await post(port, rng.choice(BAD))
    return kind, status in (400, 404) and b'"error":' in text


async def client(port: int, seed: int, deadline: float, counts: collections.Counter[str]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < deadline:
        try:
            kind, is_right = await one_request(port, rng)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            kind, is_right = type(error).__name__, False
        counts[kind] += 1
        if not is_right:
            counts["unexpected"] += 1
            print(f"unexpected answer to {kind}", flush=True)
        await asyncio.sleep(rng.random() * 0.05)


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    text = await reader.read()
    writer.close()
    return text.decode()


async def watch_memory(pid: int, deadline: float, samples: list[float]) -> None:
    while time.monotonic() < deadline:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        samples.append(pages * resource.getpagesize() / 2**20)
        await asyncio.sleep(1)


async def burst(port: int, num: int) -> collections.Counter[int]:
    """All at once: each is answered or refused, none is lost."""
    rng = random.Random(0)
    answers = await asyncio.gather(*(post(port, chat_body(rng, max_tokens=1)) for _ in range(num)))
    return collections.Counter(status for status, _ in answers)


async def soak(port: int, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    while "200 OK" not in await get(port, "/health"):
        await asyncio.sleep(0.2)
    result: dict[str, Any] = {}
    if args.burst:
        result["burst"] = {str(status): num for status, num in (await burst(port, args.burst)).items()}
        print(f"burst of {args.burst}: {result['burst']}")
    deadline = time.monotonic() + args.minutes * 60
    counts: collections.Counter[str] = collections.Counter()
    samples: list[float] = []
    clients = [client(port, seed, deadline, counts) for seed in range(args.clients)]
    await asyncio.gather(*clients, watch_memory(pid, deadline, samples))
    await asyncio.sleep(2)
    metrics = await get(port, "/metrics")
    left = {
        name: float(match[1])
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        if (match := re.search(rf"^openwafer:{name}{{[^}}]*}} (\S+)", metrics, re.MULTILINE))
    }
    tenth = max(len(samples) // 10, 1)
    early, late = statistics.median(samples[tenth : 2 * tenth]), statistics.median(samples[-tenth:])
    return {
        **result,
        "minutes": args.minutes,
        "clients": args.clients,
        "requests": dict(counts),
        "unexpected": counts["unexpected"],
        "memory_mib": {"second_tenth": round(early, 1), "last_tenth": round(late, 1), "peak": round(max(samples), 1)},
        "left_over": left,
        "is_good": counts["unexpected"] == 0 and late <= early * 1.05 and not any(left.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--burst", type=int, default=0, help="requests opened at once before the soak (default none)")
    parser.add_argument("--model", help="a real model instead of the null engine")
    parser.add_argument("--out", type=Path, help="where the result is written as JSON")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 65536 else max(soft, 65536), hard))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, args.model), daemon=True)
    process.start()
    try:
        result = asyncio.run(soak(ours.recv(), process.pid or os.getpid(), args))
    finally:
        process.kill()
        process.join()
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(0 if result["is_good"] else 1)


if __name__ == "__main__":
    main()
