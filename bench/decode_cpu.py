"""Tokens per second on the CPU, ours beside llama.cpp on the same file: `python bench/decode_cpu.py --peer PYTHON`.

PYTHON is an interpreter with llama-cpp-python (a virtual environment of its own; without --peer ours runs alone).
Both take turns in the same run, each in its own process. The machine may be shared, so the best prompt and the best
8 tokens in a row of all rounds count, for both. The floor of decoding is the time to read the file's weights once per
token at the read bandwidth measured with as many bytes.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from _child import child_environment

if TYPE_CHECKING:
    from openwafer.serve.core import Engine

TEXT = "The sea was calm that morning, and the old man rowed out past the last buoy to where the water turned dark. "

PEER = """
import json, sys, time
from llama_cpp import Llama
path, threads, clock = sys.argv[1], int(sys.argv[2]), getattr(time, sys.argv[3])
llm = Llama(path, n_threads=threads, n_threads_batch=threads, n_ctx=2048, n_batch=512, verbose=False)
def run(tokens, count):
    llm.reset()
    began = clock()
    llm.eval(tokens)
    token = llm.sample(temp=0.0)
    prompt_s = clock() - began
    times = [clock()]
    for _ in range(count):
        llm.eval([token])
        token = llm.sample(temp=0.0)
        times.append(clock())
    return {"prompt_s": prompt_s, "times": times}
for line in sys.stdin:
    job = json.loads(line)
    print(json.dumps(run(job["tokens"], job["count"])), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="pulled name or GGUF file")
    parser.add_argument("--peer", help="python with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clock",
        choices=["perf_counter", "process_time"],
        default="perf_counter",
        help="process_time with --threads 1: processor time, which other work on the machine changes little",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve-worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_worker:
        worker(args)
        return
    from openwafer.models.load import open_model

    stored = open_model(args.model)
    tokenizer = stored.tokenizer()
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT * (args.prompt // 10))[: args.prompt]
    ours = Worker(
        [
            sys.executable,
            __file__,
            "--serve-worker",
            "--model",
            args.model,
            "--threads",
            str(args.threads),
            "--clock",
            args.clock,
        ]
    )
    peer = Worker([args.peer, "-c", PEER, str(stored.path), str(args.threads), args.clock]) if args.peer else None
    results: dict[str, list[float]] = {}
    for number in range(args.rounds):
        # A prompt of its own each round: ours would find the last one in its cache.
        start = [number + 100, *tokens[1:]]
        short = [number + 200, *tokens[1:16]]
        for name, who in (("ours", ours), ("llama.cpp", peer)):
            if who is not None:
                prompt = who.do({"tokens": start, "count": 1})
                results.setdefault(f"{name} prompt", []).append(len(tokens) / prompt["prompt_s"])
                decode = who.do({"tokens": short, "count": args.tokens})
                results.setdefault(f"{name} decode", []).append(rate(decode["times"]))
        many = ours.do({"tokens": short, "count": args.tokens, "users": args.users})
        results.setdefault(f"ours {args.users} users", []).append(args.users * rate(many["times"]))
    weights = stored.path.stat().st_size
    bandwidth = ours.do({"read": weights})["bytes_per_s"]
    best = {name: max(rates) for name, rates in results.items()}
    best["floor decode"] = bandwidth / weights
    ours.close()
    if peer is not None:
        peer.close()
    report(best, args, bandwidth)


def rate(times: list[float]) -> float:
    """Tokens per second of the fastest 8 in a row."""
    return max(8 / (stop - start) for start, stop in zip(times, times[8:], strict=False))


def report(best: dict[str, float], args: argparse.Namespace, bandwidth: float) -> None:
    if args.json:
        print(json.dumps({name: round(rate, 1) for name, rate in best.items()}))
        return
    unit = "tokens/s" if args.clock == "perf_counter" else "tokens per second of processor time"
    print(f"{args.model}, {args.threads} threads, prompt of {args.prompt}, {args.tokens} tokens decoded; {unit}")
    print(f"{'':24}{'ours':>10}{'llama.cpp':>12}{'ratio':>8}")
    for what in ("prompt", "decode"):
        mine, other = best[f"ours {what}"], best.get(f"llama.cpp {what}")
        beside = f"{other:12.1f}{mine / other:8.2f}" if other else ""
        print(f"{what:24}{mine:10.1f}{beside}")
    many = best[f"ours {args.users} users"]
    print(f"{f'{args.users} users, total':24}{many:10.1f}   {many / best['ours decode']:.2f} times one user")
    floor = best["floor decode"]
    print(f"{'floor of decoding':24}{floor:10.1f}   reading the file once per token at {bandwidth / 1e9:.1f} GB/s")


class Worker:
    """A process that measures when it is told to."""

    def __init__(self, command: list[str]) -> None:
        env = child_environment() if command[0] == sys.executable else None
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def do(self, job: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def worker(args: argparse.Namespace) -> None:
    from openwafer.serve.engine import EngineConfig, open_engine

    engine, _, _ = open_engine(args.model, EngineConfig(num_threads=args.threads))
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        result = (
            {"bytes_per_s": read_bandwidth(job["read"], args.threads)}
            if "read" in job
            else measure(engine, job, number, getattr(time, args.clock))
        )
        print(json.dumps(result), flush=True)
    engine.close()


def measure(engine: "Engine", job: dict[str, Any], number: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds to the first token and from there to the last, of one request or of several at once."""
    import threading

    from openwafer.serve.core import Event, Request, Sampling

    users = job.get("users", 1)
    first: list[float] = []
    steps: list[float] = []  # when the first user got a token
    num_done = 0
    done = threading.Event()

    def listen(user: int):
        seen = 0

        def on_event(event: Event) -> None:
            nonlocal seen, num_done
            if seen == 0 and event.tokens:
                first.append(clock())
            if user == 0 and event.tokens:
                steps.append(clock())
            seen += len(event.tokens)
            if event.finish_reason is not None:
                num_done += 1
                if num_done == users:
                    done.set()

        return on_event

    began = clock()
    for user in range(users):
        prompt = (user + 300 if users > 1 else job["tokens"][0], *job["tokens"][1:])
        sampling = Sampling(max_tokens=job["count"] + 1, temperature=0.0)
        engine.submit(Request(id=f"{number}-{user}", prompt=prompt, sampling=sampling), listen(user))
    done.wait()
    # All users get a token in each step once the last prompt is done.
    return {"prompt_s": max(first) - began, "times": [at for at in steps if at >= max(first)]}


def read_bandwidth(num_bytes: int, num_threads: int) -> float:
    """Bytes per second that the threads read of an array of the file's size, which a large cache may hold as well."""
    import torch

    torch.set_num_threads(num_threads)
    values = torch.ones(num_bytes // 4)
    times = []
    for read in (values.sum, values.amax, lambda: torch.dot(values, values)) * 5:
        began = time.perf_counter()
        read()
        times.append(time.perf_counter() - began)
    return values.nbytes / min(times)


if __name__ == "__main__":
    main()
