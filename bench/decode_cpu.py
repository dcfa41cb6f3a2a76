"""Tokens per second on the CPU, ours beside llama.cpp on the same file: `python bench/decode_cpu.py --peer PYTHON`.

PYTHON is an interpreter with llama-cpp-python (a virtual environment of its own; without --peer ours runs alone).
Both take turns in the same run, each in its own process, and the best of some rounds counts: the machine may be
shared. The floor of decoding is the time to read the file's weights once per token at the measured read bandwidth.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The sea was calm that morning, and the old man rowed out past the last buoy to where the water turned dark. "

PEER = """
import json, sys, time
from llama_cpp import Llama
path, threads = sys.argv[1], int(sys.argv[2])
llm = Llama(path, n_threads=threads, n_threads_batch=threads, n_ctx=2048, n_batch=512, verbose=False)
def run(tokens, count):
    llm.reset()
    began = time.perf_counter()
    llm.eval(tokens)
    token = llm.sample(temp=0.0)
    prompt_s = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(count):
        llm.eval([token])
        token = llm.sample(temp=0.0)
    return prompt_s, time.perf_counter() - began
for line in sys.stdin:
    job = json.loads(line)
    prompt_s, decode_s = run(job["tokens"], job["count"])
    print(json.dumps({"prompt_s": prompt_s, "decode_s": decode_s}), flush=True)
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
    ours = Worker([sys.executable, __file__, "--serve-worker", "--model", args.model, "--threads", str(args.threads)])
    peer = Worker([args.peer, "-c", PEER, str(stored.path), str(args.threads)]) if args.peer else None
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
                results.setdefault(f"{name} decode", []).append(args.tokens / decode["decode_s"])
        many = ours.do({"tokens": short, "count": args.tokens, "users": args.users})
        results.setdefault(f"ours {args.users} users", []).append(args.users * args.tokens / many["decode_s"])
    bandwidth = ours.do({"bandwidth": True})["bytes_per_s"]
    weights = stored.path.stat().st_size
    best = {name: max(rates) for name, rates in results.items()}
    best["floor decode"] = bandwidth / weights
    ours.close()
    if peer is not None:
        peer.close()
    report(best, args, bandwidth)


def report(best: dict[str, float], args: argparse.Namespace, bandwidth: float) -> None:
    if args.json:
        print(json.dumps({name: round(rate, 1) for name, rate in best.items()}))
        return
    print(f"{args.model}, {args.threads} threads, prompt of {args.prompt}, {args.tokens} tokens decoded; tokens/s")
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
        env = {"PYTHONPATH": str(ROOT)} if command[0] == sys.executable else {}
        import os

        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | env
        )

    def do(self, job: dict[str, object]) -> dict[str, float]:
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
        result = {"bytes_per_s": read_bandwidth()} if "bandwidth" in job else measure(engine, job, number)
        print(json.dumps(result), flush=True)
    engine.close()


def measure(engine, job: dict, number: int) -> dict[str, float]:
    """Seconds to the first token and from there to the last, of one request or of several at once."""
    import threading

    from openwafer.serve.core import Event, Request, Sampling

    users = job.get("users", 1)
    first: list[float] = []
    last: list[float] = []
    done = threading.Event()

    def listen():
        seen = 0

        def on_event(event: Event) -> None:
            nonlocal seen
            if seen == 0 and event.tokens:
                first.append(time.perf_counter())
            seen += len(event.tokens)
            if event.finish_reason is not None:
                last.append(time.perf_counter())
                if len(last) == users:
                    done.set()

        return on_event

    began = time.perf_counter()
    for user in range(users):
        prompt = (user + 300 if users > 1 else job["tokens"][0], *job["tokens"][1:])
        sampling = Sampling(max_tokens=job["count"] + 1, temperature=0.0)
        engine.submit(Request(id=f"{number}-{user}", prompt=prompt, sampling=sampling), listen())
    done.wait()
    return {"prompt_s": max(first) - began, "decode_s": max(last) - max(first)}


def read_bandwidth() -> float:
    """Bytes per second that all threads of PyTorch read from memory, by summing an array larger than any cache."""
    import torch

    values = torch.ones(64 << 20)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - began)
    return values.numel() * 4 / min(times)


if __name__ == "__main__":
    main()
