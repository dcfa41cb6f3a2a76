"""One `load` for everything that holds a model."""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models

from openwafer.errors import UserError
from openwafer.models.load import load


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENWAFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_gguf_file_and_its_folder(write_gguf, tiny_llama):
    path = write_gguf("llama", *tiny_llama)
    for source in (path, str(path), path.parent):
        module, tokenizer = load(source)
        assert tokenizer is not None
        ids = torch.tensor([tokenizer.encode("abc", add_special=True)])
        assert module(ids).shape == (1, 3, 259)


def test_gguf_without_tokenizer(write_gguf, tiny_llama):
    metadata, tensors = tiny_llama
    metadata = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    assert load(write_gguf("llama", metadata, tensors))[1] is None


def test_hugging_face_folder(tmp_path: Path):
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    module, tokenizer = load(tmp_path)
    assert torch.allclose(module.eval()(ids), reference(ids).logits, atol=1e-5)
    assert tokenizer is None
    Backend(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    module, tokenizer = load(tmp_path, torch.bfloat16)
    assert tokenizer is not None
    assert next(module.parameters()).dtype == torch.bfloat16


def test_pulled_name(write_gguf, tiny_llama, cache: Path):
    with pytest.raises(UserError, match="openwafer pull smollm2"):
        load("smollm2")
    path = write_gguf("llama", *tiny_llama)
    (cache / "models" / "smollm2").mkdir(parents=True)
    path.rename(cache / "models" / "smollm2" / path.name)
    assert load("smollm2")[1] is not None


@pytest.mark.usefixtures("cache")
def test_not_a_model(tmp_path: Path):
    with pytest.raises(UserError, match=r"no file or folder smolm2, and unknown .* did you mean 'smollm2'"):
        load("smolm2")
    with pytest.raises(UserError, match="openwafer pull org/name"):
        load("org/name")
    with pytest.raises(UserError, match=r"a GGUF file; a checkpoint .*; a Hugging Face folder"):
        load(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match="none of the things"):
        load(tmp_path / "notes.txt")
    (tmp_path / "x.gguf").write_text("hello")
    with pytest.raises(UserError, match="not with GGUF"):
        load(tmp_path / "x.gguf")
