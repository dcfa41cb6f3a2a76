"""`openwafer chat`: one answer, JSON, a conversation, models without a chat template."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from openwafer.cli.main import main


@pytest.fixture
def plain_model(tmp_path: Path) -> str:
    """A tiny Hugging Face folder with bytes as tokens and no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=256,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,  # nothing ends a text, so every answer has its full length
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.network
def test_smollm2_answers(smollm2_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["chat", str(smollm2_path), "What is the capital of France?"]
    assert main([*command, "--temperature", "0", "--max-tokens", "12"]) == 0
    shown = capsys.readouterr()
    assert "Paris" in shown.out
    assert "tokens/s" in shown.err
    assert main([*command, "--temperature=0", "--max_tokens=12", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == shown.out.rstrip("\n")
    assert answer["finish_reason"] == "stop"
    assert 1 < answer["tokens"] < 12
    assert answer["prompt_tokens"] == 37


@pytest.mark.network
def test_smollm2_conversation(smollm2_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hello.\n\nWhat did I ask first?\n"))
    flags = ["--max_tokens=8", "--temperature=0", "--system=Answer in one word."]
    assert main(["chat", str(smollm2_path), *flags]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) >= 2
    assert shown.err.count("tokens/s") == 2


def test_plain_continuation(plain_model: str, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", plain_model, "once", "--max_tokens", "5", "--seed", "1", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["tokens"], first["prompt_tokens"], first["finish_reason"]) == (5, 4, "length")
    assert main(["chat", plain_model, "once", "--max_tokens", "5", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == first["text"]
    # A conversation with it: every line is a text of its own.
    command = [sys.executable, "-m", "openwafer", "chat", plain_model, "--max_tokens=3"]
    done = subprocess.run(command, input=b"once\nupon\n", capture_output=True)
    assert done.returncode == 0
    assert done.stderr.count(b"3 tokens in") == 2


def test_answer_ends_with_the_context(plain_model: str, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", plain_model, "x" * 30, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["tokens"], answer["finish_reason"]) == (2, "length")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["x" * 40], "the prompt has 40 tokens and the model sees 32"),
        ([""], "nothing to continue"),
        (["hi", "--system", "be kind"], "no chat template"),
        (["hi", "--max_tokens", "0"], "--max_tokens must be at least 1"),
        (["hi", "--temperature", "hot"], "--temperature must be a number"),
        (["hi", "--top_p", "2"], "--top_p must be at most 1"),
        (["hi", "--seed", "-1"], "--seed must be at least 0"),
        (["--json"], "give PROMPT"),
    ],
)
def test_mistakes(plain_model: str, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str):
    assert main(["chat", plain_model, *flags]) == 2
    shown = capsys.readouterr()
    assert reason in shown.err
    assert shown.out == ""


def test_no_tokenizer(plain_model: str, capsys: pytest.CaptureFixture[str]):
    (Path(plain_model) / "tokenizer.json").unlink()
    assert main(["chat", plain_model, "hi"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
