"""Models from GGUF: each architecture against Hugging Face's model of the same weights, then SmolLM2."""

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from openwafer.errors import UserError
from openwafer.models.config import ModelConfig, RopeScaling
from openwafer.models.generate import generate
from openwafer.models.gguf import config_from_gguf, iter_tensors, load_gguf
from openwafer.models.gguf_file import GgufFile
from openwafer.models.gguf_tokenizer import tokenizer_from_gguf

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _reference(kind: str) -> transformers.PreTrainedModel:
    """A tiny Hugging Face model whose every parameter is random."""
    make = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
        "llama-3.1": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)
        ),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=16)),
        # Seven layers, so that one of them is global, and a window shorter than the text.
        "gemma3": lambda: transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(
                **SHAPE | {"num_hidden_layers": 7}, head_dim=16, sliding_window=8, query_pre_attn_scalar=16
            )
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=64)
        ),
    }
    model = make[kind]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def _metadata(kind: str, arch: str, config: Any) -> dict[str, Any]:
    values = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 128 if kind == "gpt2" else 48,
        "attention.head_count": 4,
    }
    if kind == "gpt2":
        return {f"gpt2.{k}": v for k, v in (values | {"attention.layer_norm_epsilon": 1e-5}).items()}
    values |= {"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    values["rope.freq_base"] = {"gemma3": 1e6, "llama-3.1": 500000.0}.get(kind, 10000.0)
    if kind in ("qwen3", "gemma3"):
        values |= {"attention.key_length": 16, "attention.value_length": 16}
    if kind == "gemma3":
        values["attention.sliding_window"] = 8
    return {f"{arch}.{k}": v for k, v in values.items()}


def _as_llama_cpp(arch: str, name: str, values: np.ndarray) -> np.ndarray:
    """What llama.cpp's converter does to the weights of these architectures."""
    if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = 4 if "q_proj" in name else 2
        rows = values.shape[0]
        return values.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    if arch == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return values.T
    return values


def _tensors(arch: str, model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's weights under llama.cpp's names, which the gguf package knows."""
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.named_parameters():  # a tied head comes once
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        tensors[short] = np.ascontiguousarray(_as_llama_cpp(arch, name, parameter.detach().numpy()))
    return tensors


@pytest.mark.parametrize("kind", ["llama", "llama-3.1", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_same_logits_as_hugging_face(kind: str, write_gguf):
    arch = kind.split("-")[0]
    reference = _reference(kind)
    tensors = _tensors(arch, reference)
    if kind == "llama-3.1":
        rope = reference.model.rotary_emb.inv_freq.numpy()
        plain = 500000.0 ** -(np.arange(0, 8, 2, dtype=np.float64) / 8)
        tensors["rope_freqs.weight"] = plain / rope
    path = write_gguf(arch, _metadata(kind, arch, reference.config), tensors)
    ours = load_gguf(path).eval()
    ids = torch.randint(0, 60, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert (ours(ids) - reference(ids).logits).abs().max() < 1e-4
    assert ("output.weight" in tensors) == (not config_from_gguf(path).tied)


def test_llama3_frequencies_become_the_rule(write_gguf, tiny_llama):
    metadata, tensors = tiny_llama
    metadata["llama.rope.freq_base"] = 500000.0
    tensors["rope_freqs.weight"] = _divisors(factor=32.0)
    scaling = config_from_gguf(write_gguf("llama", metadata, tensors)).rope_scaling
    assert scaling == RopeScaling(kind="llama3", factor=32.0)
    tensors["rope_freqs.weight"] = np.ones(4)
    assert config_from_gguf(write_gguf("llama", metadata, tensors)).rope_scaling is None
    tensors["rope_freqs.weight"] = np.array([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(UserError, match="Llama 3's rule"):
        config_from_gguf(write_gguf("llama", metadata, tensors))


def _divisors(factor: float) -> np.ndarray:
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE | {"factor": factor})
    stretched = transformers.LlamaForCausalLM(config).model.rotary_emb.inv_freq.numpy()
    return 500000.0 ** -(np.arange(0, 8, 2, dtype=np.float64) / 8) / stretched


def test_linear_scaling(write_gguf, tiny_llama):
    metadata, tensors = tiny_llama
    metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    scaling = config_from_gguf(write_gguf("llama", metadata, tensors)).rope_scaling
    assert scaling == RopeScaling(kind="linear", factor=4.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"llama.block_count": 2**31}, "block_count = 2147483648"),
        ({"llama.embedding_length": 33}, "embedding_length = 33"),
        ({"llama.feed_forward_length": 2**31}, "feed_forward_length"),
        ({"llama.attention.head_count": 2**31}, "rotary|heads"),
        ({"llama.attention.head_count": 0}, "heads"),
        ({"llama.attention.head_count_kv": 4}, "attn_k.weight has 16 rows"),
        ({"llama.attention.head_count_kv": [2, 1]}, "same for all layers"),
        ({"llama.attention.key_length": 2**31}, "4 heads of 2147483648"),
        ({"llama.attention.value_length": 16}, "different sizes"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "nan"),
        ({"llama.rope.freq_base": -1.0}, "rope_theta must be at least 1"),
        ({"llama.rope.dimension_count": 4}, "part of each head"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.context_length": None}, "no llama.context_length"),
    ],
)
def test_absurd_metadata(write_gguf, tiny_llama, changes: dict[str, Any], reason: str):
    metadata, tensors = tiny_llama
    metadata = {k: v for k, v in (metadata | changes).items() if v is not None}
    path = write_gguf("llama", metadata, tensors)
    with pytest.raises(UserError, match=reason) as caught:
        load_gguf(path)
    assert str(path) in str(caught.value)


def test_unknown_architecture(write_gguf):
    with pytest.raises(UserError, match="unknown architecture 'lama': did you mean 'llama'"):
        load_gguf(write_gguf("lama", {}, {"t": np.zeros(4)}))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_v.weight"])
def test_missing_tensor(write_gguf, tiny_llama, name: str):
    metadata, tensors = tiny_llama
    del tensors[name]
    with pytest.raises(UserError, match="missing"):
        load_gguf(write_gguf("llama", metadata, tensors))


def test_stray_tensor(write_gguf, tiny_llama):
    metadata, tensors = tiny_llama
    path = write_gguf("llama", metadata, tensors | {"blk.0.ffn_gate_inp.weight": np.zeros((4, 4))})
    with pytest.raises(UserError, match=r"'blk\.0\.ffn_gate_inp\.weight' is not part of a llama model"):
        load_gguf(path)


def test_dtype(write_gguf, tiny_llama):
    module = load_gguf(write_gguf("llama", *tiny_llama), torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name three colours.",
    "def fibonacci(n):",
    "12 + 30 =",
    "Why is the sky blue?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "List the planets of the solar system.",
    "Explain gravity to a child 🙂",
]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> transformers.PreTrainedModel:
    """SmolLM2 as transformers reads the same file: its own reader, dequantisation and row order."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    with pytest.MonkeyPatch.context() as patch:  # else the same table of names is made 400 times
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        tensors = load_gguf_checkpoint(str(smollm2_path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    return model.eval()


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> torch.nn.Module:
    return load_gguf(smollm2_path)


@pytest.mark.network
def test_smollm2_config(smollm2_path: Path):
    config = config_from_gguf(smollm2_path)
    assert config == ModelConfig(
        family="llama",
        hidden_size=576,
        num_hidden_layers=30,
        num_heads=9,
        num_kv_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        norm_eps=float(np.float32(1e-5)),
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    assert sum(tensor.numel() for _, tensor in iter_tensors(GgufFile(smollm2_path))) == 134_515_008


@pytest.mark.network
def test_smollm2_logits(smollm2, reference):
    ids = torch.randint(0, 49152, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert (smollm2(ids) - reference(ids).logits).abs().max() <= 2e-3


@pytest.mark.network
def test_smollm2_greedy_continuations(smollm2, reference, smollm2_path: Path):
    """Each token we chose is the reference's choice after the same tokens, so the greedy texts are equal."""
    tokenizer = tokenizer_from_gguf(smollm2_path)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))
        ours = list(generate(smollm2, ids, 12))
        with torch.inference_mode():
            choices = reference(torch.tensor([ids + ours])).logits[0].argmax(-1).tolist()
        assert ours == choices[len(ids) - 1 : -1]
        texts.append(tokenizer.decode(ours))
    assert "Paris" in texts[0]
