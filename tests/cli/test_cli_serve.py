"""`openwafer serve` as a process: a model with random weights, a signal in the middle of an answer."""

import concurrent.futures
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import transformers

from openwafer.cli.main import main
from openwafer.serve.keys import KeyStore
from tests.serve.script_server import EOS, TOKENIZER

PROMPT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@dataclass
class Process:
    process: subprocess.Popen[str]
    url: str
    keys: Path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=TOKENIZER.vocab_size,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    TOKENIZER.backend.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TOKENIZER.chat_template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def serving(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    keys = tmp_path_factory.mktemp("keys") / "keys.sqlite"
    command = [sys.executable, "-m", "openwafer", "serve", str(tiny), "--port", "0", "--keys", str(keys)]
    process = subprocess.Popen([*command, "--max-model-len", "900"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        match = re.search(r"serving tiny at (http://127\.0\.0\.1:\d+) \(no API keys, so only this machine", first)
        assert match, first
        for line in process.stderr:
            if '"message": "ready"' in line:
                break
        yield Process(process, match[1], keys)
    finally:
        process.kill()
        process.communicate()


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
        long = {**PROMPT, "stream": True, "max_tokens": 300, "logit_bias": {str(EOS): -100}}
        with http.stream("POST", "/v1/chat/completions", json=long) as response:
            lines = response.iter_lines()
            next(lines)
            serving.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
    # The answer that was being written is whole, and the end counts as success.
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 300
    assert serving.process.wait(timeout=30) == 0
    store = KeyStore(serving.keys)
    (row,) = store.usage()
    store.close()
    assert (row.key_id, row.model, row.requests) == ("local", "tiny", 12)


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
    ],
)
def test_mistakes(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str):
    assert main(["serve", str(tiny), "--keys", str(tmp_path / "keys"), *flags]) == 2
    assert reason in capsys.readouterr().err


def test_model_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", str(tmp_path / "none"), "--port", "0", "--keys", str(tmp_path / "keys")]) == 2
    assert "no file or folder" in capsys.readouterr().err
