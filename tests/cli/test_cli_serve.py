"""`openwafer serve` as a process: a model with random weights, a signal in the middle of an answer."""

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from torch.distributed.run import get_args_parser

from openwafer.cli import serve
from openwafer.cli.main import main
from openwafer.models.load import open_model
from openwafer.models.tokenizer import Tokenizer
from openwafer.serve.core import Engine
from openwafer.serve.engine import EngineConfig, LocalEngine, open_engine
from openwafer.serve.gpu.opening import open_on_gpus
from openwafer.serve.keys import KeyStore
from tests.serve.conftest import Client as EngineClient
from tests.serve.gpu.late_gpu import LateGpus
from tests.serve.saved_model import saved_model
from tests.serve.script_server import EOS

LATE = (str(Path(__file__).parents[1] / "serve" / "gpu" / "late_program.py"),)
PROMPT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@dataclass
class Process:
    process: subprocess.Popen[str]
    url: str
    keys: Path
    said: str  # before it was ready


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "tiny", num_layers=2)


@contextlib.contextmanager
def served(model: Path, folder: Path, *flags: str, program: Sequence[str] = ("-m", "openwafer")) -> Iterator[Process]:
    keys = folder / "keys.sqlite"
    command = [sys.executable, *program, "serve", str(model), "--port", "0", "--keys", str(keys)]
    process = subprocess.Popen([*command, "--max-model-len", "900", *flags], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        match = re.search(r"loading tiny, to be served at (http://127\.0\.0\.1:\d+) \(no API keys, so only", first)
        assert match, first
        said = ""
        for line in process.stderr:
            said += line
            if '"message": "ready"' in line:
                break
        yield Process(process, match[1], keys, said)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def serving(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with served(tiny, tmp_path_factory.mktemp("keys")) as running:
        yield running


def test_serves_and_stops_after_the_answer(serving: Process):
    with httpx.Client(base_url=serving.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
        answers = [http.post("/v1/chat/completions", json={**PROMPT, "max_tokens": 8}).json() for _ in range(2)]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert texts[0] == texts[1]
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["abc"]}, "strict": True}}
        forced = http.post("/v1/chat/completions", json={**PROMPT, "response_format": wanted}).json()
        assert forced["choices"][0]["message"]["content"] == '"abc"'
        assert http.post("/v1/chat/completions", json={**PROMPT, "max_tokens": 901}).status_code == 400
        _same_alone_and_in_company(http)
        # Long enough: the server looks ten times a second whether it shall stop.
        long = {**PROMPT, "n": 8, "stream": True, "max_tokens": 850, "logit_bias": {str(EOS): -100}}
        with http.stream("POST", "/v1/chat/completions", json=long) as response:
            lines = response.iter_lines()
            next(lines)
            serving.process.send_signal(signal.SIGTERM)
            _is_told_that_it_stops(http)
            rest = [line for line in lines if line]
    # The answers that were being written are whole, and the end counts as success.
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 8 * 850
    _, said = serving.process.communicate(timeout=120)
    assert serving.process.returncode == 0
    assert '"message": "stopping", "requests_to_finish": 8' in said
    store = KeyStore(serving.keys)
    (row,) = store.usage()
    store.close()
    assert (row.key_id, row.model, row.requests) == ("local", "tiny", 12)


def _is_told_that_it_stops(http: httpx.Client) -> None:
    """Whoever comes while the last answers are written."""
    deadline = time.monotonic() + 60
    while (health := http.get("/health").json())["status"] == "ok":
        assert time.monotonic() < deadline
    assert health["status"] == "stopping"
    refused = http.post("/v1/chat/completions", json=PROMPT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
    assert refused.headers["retry-after"] == "5"


def test_two_processes_answer_as_one_and_the_loss_of_one_ends_the_server(tiny: Path, tmp_path: Path) -> None:
    seeded = {**PROMPT, "temperature": 1, "seed": 11, "max_tokens": 12, "logprobs": True}
    with served(tiny, tmp_path, "--num-csx", "2") as two, httpx.Client(base_url=two.url, timeout=60) as http:
        stages = _children(two.process.pid)
        assert len(stages) == 2
        choice = http.post("/v1/chat/completions", json=seeded).json()["choices"][0]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == _logprobs_of_one_process(tiny)
        metrics = http.get("/metrics").text
        assert re.search(r'openwafer:stage_busy_seconds_total\{model_name="tiny",stage="2"\} 0\.\d*[1-9]', metrics)
        long = {**PROMPT, "n": 8, "stream": True, "max_tokens": 800, "logit_bias": {str(EOS): -100}}
        with http.stream("POST", "/v1/chat/completions", json=long) as response:
            lines = response.iter_lines()
            next(lines)
            for stage in stages:
                os.kill(stage, signal.SIGTERM)  # as a service manager does: the server decides when they go
            next(lines)
            os.kill(stages[1], signal.SIGKILL)
            began = time.monotonic()
            rest = "".join(lines)
        assert f"stage 2 of 2 (process {stages[1]}) was ended by SIGKILL" in rest
        _, said = two.process.communicate(timeout=120)
        assert time.monotonic() - began < 60
        assert two.process.returncode == 2
        assert said.rstrip().splitlines()[-1].startswith(f"openwafer: stage 2 of 2 (process {stages[1]}) was ended")
        assert not Path(f"/proc/{stages[0]}").exists()


def test_stages_on_gpus_with_streamed_layers_answer_as_one_gpu_does(tmp_path: Path) -> None:
    """All of it, but for the GPUs, which are host memory on which copies come late."""
    model = saved_model(tmp_path / "tiny", num_layers=8)
    flags = ["--device", "cuda", "--dtype", "fp32", "--max-step-tokens", "32", "--max-running", "4"]
    flags += ["--num-csx", "2", "--kv-cache", "600kB", "--max-context", "256", "--device-memory", "2850kB"]
    seeded = {**PROMPT, "temperature": 1, "seed": 11, "max_tokens": 6, "logprobs": True}
    with served(model, tmp_path, *flags, program=LATE) as two, httpx.Client(base_url=two.url, timeout=60) as http:
        assert "are copied from host memory in every step" in two.said  # those of the stage that also draws
        stages = _children(two.process.pid)
        choice = http.post("/v1/chat/completions", json=seeded).json()["choices"][0]
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        config = EngineConfig(device="cuda", dtype="fp32", max_step_tokens=32, max_running=4, kv_cache=600_000)
        assert found == _logprobs_on_one_gpu(model, config)
        long = {**PROMPT, "stream": True, "max_tokens": 200, "logit_bias": {str(EOS): -100}}
        with http.stream("POST", "/v1/chat/completions", json=long) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(stages[0], signal.SIGKILL)
            rest = "".join(lines)
        assert f"stage 1 of 2 (process {stages[0]}) was ended by SIGKILL" in rest
        assert two.process.wait(30) == 2
        assert not Path(f"/proc/{stages[1]}").exists()


def _logprobs_on_one_gpu(model: Path, config: EngineConfig) -> list[float]:
    stored = open_model(model)
    runner = open_on_gpus(stored, config, LateGpus())
    engine = LocalEngine(runner, stored.config, config, max_context=256)
    return _logprobs(engine, stored.tokenizer(), max_tokens=6)


def _children(pid: int) -> list[int]:
    """Processes that any of its threads has started, in order."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(number) for task in tasks for number in (task / "children").read_text().split())


def _logprobs_of_one_process(model: Path) -> list[float]:
    engine, tokenizer, _ = open_engine(model, EngineConfig(num_threads=2))
    return _logprobs(engine, tokenizer)


def _logprobs(engine: Engine, tokenizer: Tokenizer | None, max_tokens: int = 12) -> list[float]:
    assert tokenizer is not None
    prompt = tokenizer.encode(tokenizer.apply_chat_template(PROMPT["messages"]))
    sampling = {"temperature": 1.0, "seed": 11, "num_logprobs": 0, "stop_ids": frozenset([EOS])}
    answer = EngineClient(engine).ask(prompt, max_tokens=max_tokens, **sampling)  # pyright: ignore[reportArgumentType]
    engine.close()
    return [entry.logprob for entry in answer.logprobs]


def _same_alone_and_in_company(http: httpx.Client) -> None:
    """A seed gives the same tokens and logprobs, whoever else is asking."""
    seeded = {**PROMPT, "temperature": 1, "seed": 11, "max_tokens": 12, "logprobs": True}
    others = [{**PROMPT, "temperature": 1, "seed": seed, "max_tokens": 20} for seed in range(6)]

    def ask(body: dict) -> dict:
        return http.post("/v1/chat/completions", json=body).json()["choices"][0]

    alone = ask(seeded)
    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        *_, among = pool.map(ask, [*others, seeded])
    assert among == alone


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--port", "99999"], "--port must be at most 65535"),
        (["--host", "0.0.0.0"], "there are no API keys"),
        (["--tool-call-parser", "other"], "must be one of auto, hermes, llama3_json, generic"),
        (["--chat-template", "missing.jinja"], "cannot read --chat_template"),
        (["--served-model-name", ","], "--served_model_name must be a name"),
        (["--prot", "1"], "did you mean '--port'"),
        (["--keys", "/proc/none/keys"], "cannot keep API keys"),
        (["--num-threads", "1000000000"], "--num_threads must be at most 1024, got 1000000000"),
        (["--log-format", "xml"], "--log must be one of json, text, got 'xml'"),
    ],
)
def test_mistakes(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str):
    assert main(["serve", str(tiny), "--keys", str(tmp_path / "keys"), *flags]) == 2
    assert reason in capsys.readouterr().err


def test_torchrun_lets_every_flag_through() -> None:
    """It refuses what could be short for two flags of its own; --log is such a one, and has another name for it."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = [flag for action in parser._actions for flag in action.option_strings if flag not in ("-h", "--help")]
    assert "--log_format" in flags
    flags.remove("--log")
    for flag in flags:
        script = ["serve", "smollm2", flag, "1"]
        arguments = ["--standalone", "--nproc-per-node", "2", "-m", "openwafer", *script]
        assert get_args_parser().parse_args(arguments).training_script_args == script


def test_model_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", str(tmp_path / "none"), "--port", "0", "--keys", str(tmp_path / "keys")]) == 2
    assert "no file or folder" in capsys.readouterr().err
