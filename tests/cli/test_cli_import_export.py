"""`openwafer import` and `openwafer export` as a user runs them: there, fine-tuned, and back."""

import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from openwafer.checkpoint import Checkpoint
from openwafer.cli.main import main
from openwafer.data.prepare import PrepareConfig, prepare
from openwafer.models.load import load

WORDS = ["wafer", "stream", "weight", "layer", "mesh", "of", "the", "a", "is", "sent"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face model with its tokenizer, and a corpus prepared with it."""
    folder = tmp_path_factory.mktemp("model")
    rng = random.Random(0)
    text = folder / "text.txt"
    text.write_text(" ".join(rng.choice(WORDS) for _ in range(8_000)))
    prepare([text], folder / "first", PrepareConfig(vocab_size=300, val_fraction=0.1))
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "hf")
    (folder / "first" / "tokenizer.json").rename(folder / "hf" / "tokenizer.json")
    (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "hf" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    prepare([text], folder / "tokens", PrepareConfig(tokenizer=folder / "hf", val_fraction=0.1))
    return folder


def test_import_fine_tune_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["import", str(folder / "hf"), str(run), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["has_tokenizer"]
    assert done["num_parameters"] == 300 * 32 + 32 * 32 * 3 + 3 * 32 * 48 + 3 * 32
    stored = Checkpoint.open(Path(done["checkpoint"]))
    assert stored.step == 0
    assert {stored.read(name).dtype for name in stored.names()} == {torch.float32}
    ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    before, tokenizer = load(run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(before(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)

    params = tmp_path / "finetune.yaml"  # says nothing of the model: it is the imported one
    params.write_text(f"""
data: {{path: {folder / "tokens"}, context: 16}}
train: {{num_steps: 12, batch_size: 8, micro_batch_size: 4}}
optimizer: {{lr: 0.01, groups: [{{match: "*norm.weight", frozen: true}}]}}
""")
    flags = ["train", "--params", str(params), "--model_dir", str(run), "--mode", "train_and_eval", "--json"]
    assert main(flags) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["step"] == 12
    assert trained["eval_loss"] < 5.0 < torch.tensor(300.0).log().item()

    assert main(["train", "--model_dir", str(run), "--num_steps", "14", "--json"]) == 0  # all from the checkpoint
    assert json.loads(capsys.readouterr().out)["step"] == 14

    assert main(["export", str(run), str(out), "--shard_size", "20KB", "--json"]) == 0
    exported = json.loads(capsys.readouterr().out)
    assert (exported["model_type"], exported["num_parameters"]) == ("llama", done["num_parameters"])
    ours, again = load(run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
        assert (ours(ids) - before(ids)).abs().max() > 0.1, "it was trained"
    assert torch.equal(theirs.model.norm.weight, torch.ones(32)), "the norms were frozen"
    assert tokenizer is not None
    assert again is not None
    assert again.settings == tokenizer.settings, "the template survives training"
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert main(["chat", str(out), "the wafer", "--max_tokens", "4", "--json"]) == 0


def test_a_gguf_file(tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tiny_gguf), str(tmp_path / "run")]) == 0
    assert "with its tokenizer" in capsys.readouterr().out
    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(load(tmp_path / "run")[0](ids), load(tiny_gguf)[0](ids))


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    hidden, inner, vocab = 32, 64, 259
    shapes = {
        "token_embd": (vocab, hidden),
        "output_norm": (hidden,),
        **{f"blk.0.{name}": (hidden,) for name in ("attn_norm", "ffn_norm")},
        **{f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}": (inner, hidden) for name in ("gate", "up")},
        "blk.0.ffn_down": (hidden, inner),
    }
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "block_count": 1,
        "context_length": 64,
        "attention.head_count": 4,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    tokens = ["<s>", "</s>", "ab", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32) * 0.3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_mistakes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    run = str(tmp_path / "run")
    assert main(["import", str(folder / "hf"), run]) == 0
    assert "already holds a run (step_00000000)" in error_of("import", str(folder / "hf"), run)
    assert "no file or folder nowhere" in error_of("import", "nowhere", run)
    assert "out exists" in error_of("export", run, str(_filled(tmp_path / "out")))
    assert "--dtype must be one of fp32, bf16, fp16" in error_of("export", run, str(tmp_path / "b"), "--dtype", "int8")
    assert "has no checkpoint to take the model from" in error_of("train", "--model_dir", str(tmp_path / "none"))
    other = folder / "text.txt"
    prepare([other], tmp_path / "others", PrepareConfig(vocab_size=290))
    params = tmp_path / "params.yaml"
    params.write_text(f"data: {{path: {tmp_path / 'others'}, context: 16}}")
    assert "another tokenizer" in error_of("train", "--params", str(params), "--model_dir", run).splitlines()[-1]
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (folder / "hf").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:2000])
    assert "not a readable safetensors file" in error_of("import", str(broken), str(tmp_path / "new"))
    assert not list((tmp_path / "new").rglob("step_*"))


def _filled(folder: Path) -> Path:
    folder.mkdir()
    (folder / "mine").write_text("mine")
    return folder
