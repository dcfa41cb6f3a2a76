"""The HTTP side alone: tokens/s over many streams with an engine that costs nothing, and what it adds for one user.

    python bench/http_overhead.py [--streams 128] [--tokens 500] [--model smollm2] [--out FILE.json]

The server and the clients are processes of their own. The engine hands every running request one token per
step, as fast as the server takes them.

    ours   openwafer's server
    peer   a bare FastAPI app on the same uvicorn, one StreamingResponse per request with the same bytes per token
    floor  asyncio alone: the same bytes written to the sockets, no HTTP server in between

`per core` divides by the server's CPU seconds: on a machine with other work it is the number to compare.
With --model the one-user part runs a real model instead of a paced engine.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from _null_server import WORD, null_server  # noqa: E402 - found through the line above

PROMPT = (40, 41)
SYSTEMS = ("ours", "peer", "floor")


def serve_ours(ports: Any, step_s: float, model: str | None) -> None:
    with null_server(step_s, model) as server:
        ports.send(server.address[1])
        _report_cpu(ports, server)
        server.run()


def serve_peer(ports: Any, step_s: float, model: str | None) -> None:
    """What a first version of such a server looks like: an async generator of JSON lines."""
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, StreamingResponse

    app = FastAPI()

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        body = await request.json()

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(step_s)
                yield _chunk()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    ports.send(listener.getsockname()[1])
    _report_cpu(ports)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


def serve_floor(ports: Any, step_s: float, model: str | None) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"post" not in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            writer.close()
            return
        size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        num = json.loads(await reader.readexactly(size))["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        chunk = _chunk()
        for _ in range(num):
            await asyncio.sleep(step_s)
            writer.write(chunk)
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        ports.send(server.sockets[0].getsockname()[1])
        _report_cpu(ports)
        await server.serve_forever()

    import uvloop

    uvloop.run(main())


def _chunk() -> bytes:
    """A chunk as ours are, made anew each time."""
    choice = {"index": 0, "delta": {"content": WORD}, "logprobs": None, "finish_reason": None}
    value = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "created": 0, "model": "null"}
    return (
        b"data: " + json.dumps({**value, "system_fingerprint": "fp_0123456789", "choices": [choice]}).encode() + b"\n\n"
    )


def _report_cpu(ports: Any, server: Any = None) -> None:
    """Answers None with the CPU seconds that this process has used, a number with the speed of the engine alone."""

    def answer() -> None:
        while True:
            num_tokens = ports.recv()
            if num_tokens is not None:
                ports.send(engine_alone(server.service.served.engine, num_tokens))
                continue
            used = resource.getrusage(resource.RUSAGE_SELF)
            ports.send(used.ru_utime + used.ru_stime)

    threading.Thread(target=answer, daemon=True).start()


async def one_stream(port: int, num_tokens: int) -> int:
    """Reads one answer to its end; gives the number of chunks with text."""
    body = json.dumps(
        {"model": "null", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": num_tokens,
         "temperature": 0}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + body)
    num, tail = 0, b""
    while piece := await reader.read(1 << 16):
        # A mark may be cut in two: keep the end of each piece for the next.
        num += (tail + piece).count(b'"content":') - tail.count(b'"content":')
        tail = piece[-9:]
    writer.close()
    return num


def run_clients(port: int, num_streams: int, num_tokens: int) -> tuple[float, int]:
    import uvloop

    async def main() -> tuple[float, int]:
        began = time.perf_counter()
        counts = await asyncio.gather(*(one_stream(port, num_tokens) for _ in range(num_streams)))
        return time.perf_counter() - began, sum(counts)

    return uvloop.run(main())


def wait_healthy(port: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            if client.recv(100).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.1)
    raise SystemExit("the server did not get ready")


def measure(system: str, num_streams: int, num_tokens: int, step_s: float, model: str | None = None) -> dict[str, Any]:
    """One measurement against a new server process."""
    serve = {"ours": serve_ours, "peer": serve_peer, "floor": serve_floor}[system]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, step_s, model), daemon=True)
    process.start()
    try:
        port = ours.recv()
        wait_healthy(port)
        run_clients(port, min(num_streams, 8), 20)  # warm
        ours.send(None)
        before = ours.recv()
        seconds, num_chunks = run_clients(port, num_streams, num_tokens)
        ours.send(None)
        cpu_s = ours.recv() - before
    finally:
        process.kill()
        process.join()
    wanted = num_streams * num_tokens
    assert num_chunks >= wanted or model is not None, f"{num_chunks} of {wanted} tokens arrived"
    return {"seconds": seconds, "cpu_s": cpu_s, "tokens": min(num_chunks, wanted)}


def many_streams(num_streams: int, num_tokens: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for system in SYSTEMS:
        runs = [measure(system, num_streams, num_tokens, 0.0) for _ in range(repeats)]
        row = {
            "system": system,
            "tokens_per_s": round(max(run["tokens"] / run["seconds"] for run in runs)),
            "tokens_per_s_per_core": round(max(run["tokens"] / run["cpu_s"] for run in runs)),
        }
        print(
            f"{num_streams} streams {system:6} {row['tokens_per_s']:8} tokens/s "
            f"{row['tokens_per_s_per_core']:8} per core",
            flush=True,
        )
        rows.append(row)
    return rows


def engine_alone(engine: Any, num_tokens: int) -> float:
    """Tokens/s of the engine when nothing is in between."""
    from openwafer.serve.core import Request, Sampling

    ended = threading.Event()
    times: list[float] = []

    def on_event(event: Any) -> None:
        times.extend([time.perf_counter()] * len(event.tokens))
        if event.finish_reason is not None:
            ended.set()

    sampling = Sampling(max_tokens=num_tokens, temperature=0)
    engine.submit(Request(id=f"alone-{time.monotonic_ns()}", prompt=PROMPT, sampling=sampling), on_event)
    ended.wait()
    return (len(times) - 1) / (times[-1] - times[0])


async def _stream_times(port: int, num_tokens: int) -> list[float]:
    body = json.dumps(
        {"model": "null", "prompt": list(PROMPT), "stream": True, "max_tokens": num_tokens, "min_tokens": num_tokens,
         "temperature": 0}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + body)
    times = []
    while line := await reader.readline():
        if b'"text":' in line:
            times.append(time.perf_counter())
    writer.close()
    return times


def through_http(port: int, num_tokens: int) -> float:
    """Tokens/s that one client sees."""
    times = asyncio.run(_stream_times(port, num_tokens))
    # The finish chunk has an (empty) text too; a token that ends no character has none.
    return (num_tokens - 1) / (times[-2] - times[0])


def one_user(step_s: float, num_tokens: int, model: str | None, rounds: int) -> dict[str, Any]:
    """The engine alone and through HTTP by turns, in one process; the best of each, as other work only slows both."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_ours, args=(theirs, step_s, model), daemon=True)
    process.start()
    alone, served, alone_cpu, served_cpu = [], [], [], []

    def cpu_s() -> float:
        ours.send(None)
        return ours.recv()

    try:
        port = ours.recv()
        wait_healthy(port)
        through_http(port, num_tokens)  # warm
        for _ in range(rounds):
            before = cpu_s()
            ours.send(num_tokens)
            alone.append(ours.recv())
            between = cpu_s()
            served.append(through_http(port, num_tokens))
            alone_cpu.append(between - before)
            served_cpu.append(cpu_s() - between)
    finally:
        process.kill()
        process.join()
    row = {
        "engine": model or f"paced, {step_s * 1000:g} ms a step",
        "engine_tokens_per_s": round(max(alone), 1),
        "served_tokens_per_s": round(max(served), 1),
        "overhead_percent": round(100 * (max(alone) - max(served)) / max(alone), 2),
    }
    # Processor time is what stays comparable on a machine with other work.
    row["engine_cpu_us_per_token"] = round(1e6 * min(alone_cpu) / num_tokens)
    row["served_cpu_us_per_token"] = round(1e6 * min(served_cpu) / num_tokens)
    print(f"one user: {row}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each stream (default 500)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step_ms", type=float, default=5.0, help="pace of the one-user engine (default 5 ms)")
    parser.add_argument("--model", help="a real model for the one-user part")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "http_overhead.json")
    args = parser.parse_args()
    rows = many_streams(args.streams, args.tokens, args.repeats)
    single = one_user(args.step_ms / 1000, min(args.tokens, 200), args.model, 3 * args.repeats)
    machine = {"architecture": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    result = {"command": "bench/http_overhead.py", "machine": machine, "many_streams": rows, "one_user": single}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
