"""Our models as Hugging Face folders: transformers must load them and give the same logits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from openwafer import checkpoint
from openwafer.data.tokenize import train
from openwafer.errors import UserError
from openwafer.models.build import build
from openwafer.models.config import ModelConfig, RopeScaling
from openwafer.models.huggingface import config_from_folder, load_folder
from openwafer.models.huggingface_export import export
from openwafer.models.load import open_model

ROOT = Path(__file__).parents[2]
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "vocab_size": 61, "max_position_embeddings": 64}
LLAMA: dict[str, Any] = {"family": "llama", **SMALL, "num_kv_heads": 2, "intermediate_size": 48, "norm_eps": 1e-6}
LLAMA3 = RopeScaling(factor=8.0, original_max_position_embeddings=16)
GEMMA: dict[str, Any] = {
    **LLAMA,
    "num_hidden_layers": 6,
    "head_dim": 12,
    "activation": "gelu_tanh",
    "gemma_norms": True,
    "qk_norm": True,
    "tie_word_embeddings": True,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "rope_theta": 1000.0,
    "rope_local_theta": 10.0,
    "attention_scale": 20.0**-0.5,
}
MODELS: dict[str, tuple[str, ModelConfig]] = {
    "gpt": ("gpt2", ModelConfig(**SMALL)),
    "gpt_untied_unscaled": ("gpt2", ModelConfig(**SMALL, tie_word_embeddings=False, attention_scale=1.0)),
    "llama": ("llama", ModelConfig(**LLAMA, rope_theta=100.0, rope_scaling=LLAMA3)),
    "llama_tied_linear": (
        "llama",
        ModelConfig(**LLAMA, tie_word_embeddings=True, rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    ),
    "mistral": ("mistral", ModelConfig(**LLAMA, sliding_window=5)),
    "qwen2": ("qwen2", ModelConfig(**LLAMA, qkv_bias=True)),
    "qwen3": ("qwen3", ModelConfig(**LLAMA, qk_norm=True, head_dim=12, activation="relu")),
    "qwen3_sliding": ("qwen3", ModelConfig(**LLAMA, qk_norm=True, sliding_window=5, sliding_window_pattern=2)),
    "gemma3": ("gemma3_text", ModelConfig(**GEMMA)),
}


def random_model(config: ModelConfig) -> nn.Module:
    """Weights large enough, and norms different enough, for every mistake to show in the logits."""
    torch.manual_seed(0)
    module = build(config).eval()
    for parameter in module.parameters():
        parameter.data.add_(0.25 * torch.randn_like(parameter))
    return module


def saved(module: nn.Module, config: ModelConfig, model_dir: Path, **options: Any) -> Path:
    named = ((f"weights/{name}", parameter.detach()) for name, parameter in module.named_parameters())
    params = {"model": {key: value for key, value in vars(config).items() if key != "rope_scaling"}}
    params["model"]["rope_scaling"] = None if config.rope_scaling is None else vars(config.rope_scaling)
    return checkpoint.save(model_dir, 3, named, {"params": params, **options.pop("meta", {})}, **options)


def ids(tokens: int = 24) -> torch.Tensor:
    return torch.randint(0, 61, (2, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_transformers_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    model_type, config = MODELS[name]
    module = random_model(config)
    saved(module, config, tmp_path / "run")
    done = export(open_model(tmp_path / "run"), tmp_path / "out", shard_bytes=20_000)
    assert done.model_type == model_type
    assert done.num_shards > 1
    assert done.num_parameters == sum(p.numel() for p in module.parameters())
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = module(ids())
    assert expected.std() > 0.1
    torch.testing.assert_close(theirs.eval()(ids()).logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(load_folder(tmp_path / "out").eval()(ids()), expected), "and back again it is the same"
    again = config_from_folder(tmp_path / "out")
    for field in (
        "tied",
        "kv_heads",
        "head_size",
        "feed_forward_size",
        "nonlinearity",
        "sliding_window",
        "rope_scaling",
    ):
        assert getattr(again, field) == getattr(config, field)


def test_tokenizer_template_and_type(tmp_path: Path) -> None:
    encoder = train(["the wafer streams the weights"] * 5, 300)
    encoder.save(tmp_path / "tokenizer.json")
    config = ModelConfig(**{**LLAMA, "vocab_size": 300})
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    meta = {"tokenizer": {"chat_template": template, "bos_id": None, "eos_ids": [encoder.end_id]}}
    saved(random_model(config), config, tmp_path / "run", meta=meta, tokenizer=tmp_path / "tokenizer.json")
    done = export(open_model(tmp_path / "run"), tmp_path / "out", dtype=torch.bfloat16)
    assert (done.num_shards, done.num_bytes) == (1, 2 * done.num_parameters)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the wafer and the weights"
    assert tokenizer(text)["input_ids"] == open_model(tmp_path / "run").tokenizer().encode(text)  # pyright: ignore
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == encoder.end_id
    again = open_model(tmp_path / "out").tokenizer()
    assert again is not None
    assert again.settings == meta["tokenizer"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_bias": True, "qk_norm": True}, "never together"),
        ({"sliding_window": 4, "sliding_window_pattern": 2}, "in Mistral all layers slide"),
        ({"attention_scale": 0.3}, "attention_scale, here 0.3"),
        ({"rope_local_theta": 5.0}, "rope_local_theta"),
        ({"gemma_norms": True}, "gemma_norms go with qk_norm"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = ModelConfig(**LLAMA, **change)
    saved(random_model(config), config, tmp_path / "run")
    with pytest.raises(UserError, match=message):
        export(open_model(tmp_path / "run"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_of_a_failed_export(tmp_path: Path) -> None:
    config = MODELS["llama"][1]
    folder = saved(random_model(config), config, tmp_path / "run", shard_bytes=20_000)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep me")
    with pytest.raises(UserError, match=r"out exists: choose another folder"):
        export(open_model(folder), tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep me"
    stored = open_model(folder)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.write_bytes(b"x" * shard.stat().st_size)
    with pytest.raises(UserError, match="does not match its checksum"):
        export(stored, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


MEASURED = """
import sys, threading, time
from pathlib import Path
import torch, safetensors.torch
from openwafer.models.huggingface_export import export
from openwafer.models.load import open_model
from openwafer.train.importer import import_model

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

def peak_during(work):
    peaks, stop = [anonymous()], threading.Event()
    def watch():
        while not stop.wait(0.002):
            peaks.append(anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    before = peaks[0]
    work()
    stop.set()
    thread.join()
    return max(peaks) - before

source, out, run = map(Path, sys.argv[1:])
export(open_model(source), out.with_name("warm_up"), shard_bytes=4 << 20)  # torch loads parts of itself on first use
print(peak_during(lambda: export(open_model(source), out, shard_bytes=4 << 20)))
print(peak_during(lambda: import_model(open_model(out), run, shard_bytes=4 << 20)))
"""


def test_memory_is_bounded_by_shards(tmp_path: Path) -> None:
    config = ModelConfig(**{**LLAMA, "hidden_size": 256, "num_hidden_layers": 40, "intermediate_size": 768})
    module = build(config)
    num_bytes = 4 * sum(p.numel() for p in module.parameters())
    assert num_bytes > 100 << 20
    saved(module, config, tmp_path / "run", shard_bytes=4 << 20)
    paths = [str(tmp_path / name) for name in ("run", "out", "again")]
    done = subprocess.run([sys.executable, "-c", MEASURED, *paths], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    exported, imported = map(int, done.stdout.split())
    # A few shards of 4 MiB, and what an allocator does not give back at once; checkpoints are written by several
    # threads with a shard each.
    assert exported < 30 << 20
    assert imported < 60 << 20
    weights = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["metadata"]
    assert weights["total_size"] == num_bytes
