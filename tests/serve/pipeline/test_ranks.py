"""Stages as ranks: real torchrun and real HTTP, ranks that are killed, asked to end, or cannot load."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from openwafer.cli.main import main
from openwafer.serve.engine import EngineConfig, open_engine
from tests.serve.conftest import Client
from tests.serve.saved_model import saved_model
from tests.serve.script_server import EOS

ROOT = Path(__file__).parents[3]
PROGRAM = ("-m", "openwafer")
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SEEDED = {**ASKED, "temperature": 1, "seed": 11, "max_tokens": 12, "logprobs": True}
FAULTY = """
import sys
from openwafer.cli.main import main
from openwafer.serve.pipeline import rank
rank.run_batches = lambda *_, **__: 1 / 0
sys.exit(main(sys.argv[1:]))
"""
LONG = {**ASKED, "n": 4, "stream": True, "max_tokens": 800, "logit_bias": {str(EOS): -100}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "tiny", num_layers=12)


@pytest.fixture(scope="module")
def logprobs(tiny: Path) -> list[float]:
    """Of one process."""
    engine, tokenizer, _ = open_engine(tiny, EngineConfig(num_threads=2))
    assert tokenizer is not None
    prompt = tokenizer.encode(tokenizer.apply_chat_template(ASKED["messages"]))
    sampling = {"temperature": 1.0, "seed": 11, "num_logprobs": 0, "stop_ids": frozenset([EOS]), "max_tokens": 12}
    answer = Client(engine).ask(prompt, **sampling)  # pyright: ignore[reportArgumentType]
    engine.close()
    return [entry.logprob for entry in answer.logprobs]


class Ranks:
    """Processes that serve together, and what they say."""

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> None:
        self.said = ""
        self._changed = threading.Condition()
        self.processes = [
            subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for command, environment in zip(commands, environments, strict=True)
        ]
        self.readers = [threading.Thread(target=self._read, args=(process,)) for process in self.processes]
        for reader in self.readers:
            reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                with self._changed:
                    self.said += line
                    self._changed.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = 60) -> re.Match[str]:
        with self._changed:
            found = self._changed.wait_for(lambda: re.search(pattern, self.said), timeout_s)
            assert found, f"no {pattern} in {self.said}"
            return found

    def client(self) -> httpx.Client:
        self.wait_for(r'"message": "ready"')
        return httpx.Client(base_url=self.wait_for(r"served at (http://127\.0\.0\.1:\d+)")[1], timeout=60)

    def pid(self, rank: int) -> int:
        return int(self.wait_for(rf"\(rank {rank} on [^)]*:(\d+)\)")[1])

    def statuses(self, timeout_s: float = 20) -> list[int]:
        """When all have ended by themselves."""
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]


@contextlib.contextmanager
def torchrun(num_ranks: int, model: Path, folder: Path, *flags: str) -> Iterator[Ranks]:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    with _running([[*command, *PROGRAM, *_serve(model, folder), *flags]], [{}]) as ranks:
        yield ranks


@contextlib.contextmanager
def by_hand(model: Path, folder: Path, *flags: Sequence[str], last: Sequence[str] = PROGRAM) -> Iterator[Ranks]:
    """A rank for each tuple of flags, each on a host of its own as far as they know; quicker than torchrun.

    `last`: what Python is told to run as the last rank.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(len(flags)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    commands = [[*PROGRAM, *_serve(model, folder), *own] for own in flags[:-1]]
    commands.append([*last, *_serve(model, folder), *flags[-1]])
    with _running(commands, [{**world, "RANK": str(rank)} for rank in range(len(flags))]) as ranks:
        yield ranks


def _serve(model: Path, folder: Path) -> list[str]:
    return ["serve", str(model), "--port", "0", "--keys", str(folder / "keys.sqlite")]


@contextlib.contextmanager
def _running(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> Iterator[Ranks]:
    ranks = Ranks(commands, environments)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            for pid in [process.pid, *_below(process.pid)]:  # torchrun's ranks have sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        for reader in ranks.readers:
            reader.join()


def _asked(http: httpx.Client) -> list[float]:
    choice = http.post("/v1/chat/completions", json=SEEDED).json()["choices"][0]
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def _below(pid: int) -> list[int]:
    """Processes that it, or one of those, has started."""
    try:
        children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []  # it has ended
    return [found for some in children for child in some for found in (int(child), *_below(int(child)))]


def _is_gone(pid: int, timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def test_three_ranks_answer_as_one_process_and_the_loss_of_one_ends_all(
    tiny: Path, tmp_path: Path, logprobs: list[float]
) -> None:
    with torchrun(3, tiny, tmp_path) as ranks, ranks.client() as http:
        assert _asked(http) == logprobs
        lost, others = ranks.pid(1), [ranks.pid(0), ranks.pid(2), *_below(ranks.pid(0))]
        assert len(others) == 3
        ranks.wait_for(r"stage 3 of 3 \(rank 2 on .*\): layers \d\.\.11 of .*tiny, for the server of stage 1 of 3")
        with http.stream("POST", "/v1/chat/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(lost, signal.SIGKILL)
            rest = "".join(lines)
        error = rf"stage 2 of 3 \(rank 1 on [^)]*:{lost}\) was lost: its connection was closed"
        assert re.search(error, rest)
        ranks.wait_for(rf"\nopenwafer: {error}")
        ranks.wait_for(rf"openwafer: stage 3 of 3 \(rank 2 on .*\) ends: {error}")
        assert ranks.statuses() == [1]
        assert all(_is_gone(pid) for pid in others)


def test_two_ranks_and_a_draft_end_after_the_answer_when_one_is_asked_to(
    tiny: Path, tmp_path: Path, logprobs: list[float]
) -> None:
    draft = ("--speculation", "draft", "--draft_model", str(tiny))
    with torchrun(2, tiny, tmp_path, *draft) as ranks, ranks.client() as http:
        assert _asked(http) == logprobs
        with http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 100}) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(ranks.pid(1), signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert ranks.statuses() == [0]
        assert "ends: " not in ranks.said


def test_the_loss_of_rank_0_ends_the_others(tiny: Path, tmp_path: Path) -> None:
    with by_hand(tiny, tmp_path, (), ()) as ranks:
        os.kill(ranks.pid(0), signal.SIGKILL)
        ranks.wait_for(
            r"stage 2 of 2 \(rank 1 on .*\) ends: stage 1 of 2 \(rank 0 on .*\) was lost: its connection was"
        )
        assert ranks.statuses() == [-signal.SIGKILL, 1]


def test_a_stage_that_cannot_load_ends_all(tiny: Path, tmp_path: Path) -> None:
    """Its host has no folder for what is streamed."""
    flash = ["--dram", "220kB", "--kv_cache", "100kB", "--max_step_tokens", "8", "--flash"]
    (tmp_path / "file").write_text("")
    with by_hand(tiny, tmp_path, [*flash, str(tmp_path)], [*flash, str(tmp_path / "file")]) as ranks:
        ranks.wait_for(r"\nopenwafer: stage 2 of 2 \(rank 1 on .*\): .*file")
        assert ranks.statuses() == [2, 1]


def test_a_fault_of_a_stage_ends_all(tiny: Path, tmp_path: Path) -> None:
    """With the place in the code where it is, and an exit of its own instead of one by torch."""
    with by_hand(tiny, tmp_path, (), (), last=("-c", FAULTY)) as ranks:
        ranks.wait_for(r"\nopenwafer: stage 2 of 2 \(rank 1 on [^)]*\): ZeroDivisionError division by zero")
        assert ranks.statuses() == [2, 1]
        assert "in <lambda>" in ranks.said


def test_another_number_of_stages_than_ranks(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["serve", str(tiny), "--num_csx", "2"]) == 2
    assert "num_csx is 2, and torchrun has started 3 ranks" in capsys.readouterr().err
