"""The HTTP server in front of a GPU engine, through real sockets: `python bench/http_gpu.py [--users 1 32 128]`.

A Llama-3.1-8B shape with random bf16 weights, opened as `decode_gpu.py` does. By turns the engine is asked directly
and through HTTP with the same prompts; the server is in the engine's process, as in `openwafer serve`, and the
clients are processes of their own. Printed are tokens/s while all users decode and from the first request to the last
token, what HTTP costs of them, and the first-token time of a long prompt both ways. Then one stream through the real
`openai` client, /health and /metrics.

    --quick             record graphs for these numbers of users only
    --device cpu --tiny the same with a tiny shape and plain operations: shows that this script works, no more
    --out FILE          gets every number as a line of JSON as soon as it is known

Needs `openwafer[serve]` whole; the `openai` client is left out where it is not installed.
"""

import argparse
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _child import child_environment
from _gpu_engine import Bench, Heard, ask, decode_rate, random_prompts
from _http_clients import MARK
from _journal import Journal
from _null_server import server_of, word_tokenizer
from decode_gpu import LLAMA_8B, TINY
from http_overhead import wait_healthy

from openwafer.serve.api.served_model import ServedModel
from openwafer.serve.api.server import ApiServer
from openwafer.serve.gpu.tuning import Tuning

NAME = "random-8b"
TARGET = 5.0  # percent of one user's speed


class Clients:
    """Processes of streaming clients that share the users among them."""

    def __init__(self, port: int, num_processes: int) -> None:
        self._port = port
        command = [sys.executable, str(Path(__file__).with_name("_http_clients.py"))]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment())
            for _ in range(num_processes)
        ]

    def stream(self, requests: list[dict[str, Any]]) -> tuple[float, list[Heard]]:
        """When the first was sent, and what each heard."""
        num = min(len(requests), len(self._processes))
        answers = self._do([{"job": "streams", "requests": requests[first::num]} for first in range(num)])
        heard = [Heard(**one) for answer in answers for one in answer["heard"]]
        return min(answer["began"] for answer in answers), heard

    def through_openai(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._do([{"job": "openai", "request": request}])[0]

    def _do(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The first job to the first process and so on, all at the same time."""
        working = self._processes[: len(jobs)]
        for process, job in zip(working, jobs, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**job, "port": self._port}) + "\n")
            process.stdin.flush()
        answers = []
        for process in working:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(f"a client failed: {answer['error']}")
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.communicate()  # its stdin ends


@dataclass(kw_only=True)
class Front:
    """The engine and the server before it."""

    bench: Bench
    clients: Clients
    port: int
    num_requests: int = 0  # that came through HTTP
    num_tokens: int = 0

    def ask(self, num_users: int, num_inputs: int, num_outputs: int, seed: int) -> tuple[float, list[Heard]]:
        """What `_gpu_engine.ask` does, through HTTP: the same prompts and settings."""
        prompts = random_prompts(self.bench, num_users, num_inputs, seed)
        began, heard = self.clients.stream([self.request(prompt, num_outputs, seed) for prompt in prompts])
        for one in heard:
            assert sum(one.counts) == num_outputs, f"{sum(one.counts)} of {num_outputs} tokens arrived"
        self.num_requests += num_users
        self.num_tokens += num_users * num_outputs
        return began, heard

    def request(self, prompt: list[int], num_outputs: int, seed: int) -> dict[str, Any]:
        args = self.bench.args
        drawing = {"temperature": args.temperature, "top_p": args.top_p, "seed": seed}
        return {"model": NAME, "prompt": prompt, "max_tokens": num_outputs, **drawing}

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return answer.read().decode()


@contextmanager
def opened(args: argparse.Namespace, journal: Journal) -> Iterator[Front]:
    config = TINY if args.tiny else LLAMA_8B
    with ExitStack() as stack:
        bench = Bench.opened(config, torch.device(args.device), args, Tuning(), journal)
        stack.callback(bench.engine.close)
        model = ServedModel.make((NAME,), bench.engine, word_tokenizer(config.vocab_size, MARK))
        server: ApiServer = stack.enter_context(server_of(lambda: model, NAME))
        thread = threading.Thread(target=server.run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)
        port = server.address[1]
        wait_healthy(port)
        clients = Clients(port, args.clients)
        stack.callback(clients.close)
        yield Front(bench=bench, clients=clients, port=port)


def users(front: Front, num_users: int, journal: Journal) -> None:
    """Both ways by turns; the best of each, as other work only slows both."""
    args = front.bench.args
    best: dict[str, float] = {}
    for number in range(-1, args.rounds):
        for way, asked in _ways(front):
            if number < 0:
                asked(num_users, args.inputs, min(args.outputs, 8), 99)  # warm
                continue
            began, heard = asked(num_users, args.inputs, args.outputs, 100 + number)
            total = num_users * args.outputs / (max(mine.times[-1] for mine in heard) - began)
            for kind, rate in (("decode", decode_rate(heard)), ("total", total)):
                best[f"{way}_{kind}"] = max(best.get(f"{way}_{kind}", 0.0), rate)
    journal.note(**{f"users_{num_users}_{name}_tokens_per_s": rate for name, rate in best.items()})
    if not best["engine_decode"]:
        raise RuntimeError(f"{num_users} users are never all decoding: more --outputs or --step_tokens are needed")
    lost = {kind: 100 * (1 - best[f"http_{kind}"] / best[f"engine_{kind}"]) for kind in ("decode", "total")}
    print(
        f"{num_users} users: decoding {best['engine_decode']:.1f} tokens/s alone, {best['http_decode']:.1f} through "
        f"HTTP ({lost['decode']:+.1f} % lost{f', target {TARGET:g} %' if num_users == 1 else ''}); end to end "
        f"{best['engine_total']:.1f} and {best['http_total']:.1f} ({lost['total']:+.1f} %)",
        flush=True,
    )
    if "switching_decode" in best:
        print(
            f"{num_users} users, threads switch every {args.switch_ms:g} ms: decoding {best['switching_decode']:.1f} "
            f"tokens/s through HTTP, end to end {best['switching_total']:.1f}",
            flush=True,
        )
    journal.note(**{f"users_{num_users}_{kind}_lost_percent": share for kind, share in lost.items()})


def _ways(front: Front) -> list[tuple[str, Callable[[int, int, int, int], tuple[float, list[Heard]]]]]:
    def switching(*what: int) -> tuple[float, list[Heard]]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(front.bench.args.switch_ms / 1e3)
        try:
            return front.ask(*what)
        finally:
            sys.setswitchinterval(before)

    ways = [("engine", lambda *what: ask(front.bench, *what)), ("http", front.ask)]
    return [*ways, ("switching", switching)] if front.bench.args.switch_ms else ways


def first_token(front: Front, journal: Journal) -> None:
    args = front.bench.args
    best: dict[str, float] = {}
    for number in range(-1, args.rounds):
        for way, asked in _ways(front):
            began, heard = asked(1, args.prompt, 1, 200 + number)
            if number >= 0:
                best[way] = min(best.get(way, float("inf")), heard[0].times[0] - began)
    print(
        f"prompt of {args.prompt}: first token after {1e3 * best['engine']:.1f} ms alone, "
        f"{1e3 * best['http']:.1f} ms through HTTP",
        flush=True,
    )
    journal.note(engine_first_token_s=best["engine"], http_first_token_s=best["http"])


def openai_client(front: Front, journal: Journal) -> None:
    args = front.bench.args
    prompt = random_prompts(front.bench, 1, args.inputs, 300)[0]
    found = front.clients.through_openai(front.request(prompt, args.outputs, 300))
    if found["version"] is None:
        print("openai client: not installed", flush=True)
        journal.note(openai_client=None)
        return
    assert found["num_tokens"] == args.outputs, found
    assert found["finish_reason"] == "length", found
    assert found["usage"] == [args.inputs, args.outputs], found
    front.num_requests += 1
    front.num_tokens += args.outputs
    rate = (args.outputs - 1) / found["seconds"]
    print(f"openai client {found['version']}: {rate:.1f} tokens/s, usage {found['usage']}", flush=True)
    journal.note(openai_client=found["version"], openai_tokens_per_s=rate)


def status(front: Front, journal: Journal) -> None:
    """/health says that all is done, and /metrics counts what was asked."""
    health = json.loads(front.get("/health"))
    assert health == {"status": "ok", "num_running": 0, "num_waiting": 0}, health
    values = {}
    for line in front.get("/metrics").splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    label = f'model_name="{NAME}"'
    answered = values[f'openwafer:request_success_total{{finished_reason="length",{label}}}']
    assert answered == front.num_requests, (answered, front.num_requests)
    # The engine counts what it was asked directly, too.
    generated = values[f"openwafer:generation_tokens_total{{{label}}}"]
    assert generated >= front.num_tokens, (generated, front.num_tokens)
    print(f"/health: ok; /metrics: {answered:.0f} requests answered", flush=True)
    journal.note(health=health["status"], http_requests=front.num_requests, http_tokens=front.num_tokens)


def main() -> None:
    args = parsed()
    journal = Journal(args.out)
    with opened(args, journal) as front:
        for num_users in args.users:
            journal.part(f"users {num_users}", lambda num_users=num_users: users(front, num_users, journal))
        for part in (first_token, openai_client, status):
            journal.part(part.__name__, lambda part=part: part(front, journal))
    sys.exit(bool(journal.failed))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and few tokens")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--inputs", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--outputs", type=int, default=128, help="tokens decoded for each user")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt whose first token is timed")
    parser.add_argument("--step_tokens", type=int, default=2048, help="tokens computed in one step at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4, help="processes that the users are shared among")
    parser.add_argument(
        "--switch_ms", type=float, help="also through HTTP with Python's threads switching so often (its own is 5 ms)"
    )
    parser.add_argument("--quick", action="store_true", help="record graphs for these numbers of users only")
    parser.add_argument("--out", help="append the numbers to this file, a line of JSON each")
    # What else `Bench.opened` and `ask` look at.
    parser.set_defaults(temperature=0.0, top_p=1.0, plain=False, invariant=False)
    args = parser.parse_args()
    if args.tiny:
        args.users, args.inputs, args.outputs, args.prompt, args.step_tokens = [1, 4], 24, 12, 64, 64
        args.rounds, args.clients = min(args.rounds, 1), 2
    return args


if __name__ == "__main__":
    main()
