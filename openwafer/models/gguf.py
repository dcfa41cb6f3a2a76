"""Models from GGUF files: llama.cpp's names, orders and conventions turned into ours (Hugging Face's).

`load_gguf` builds the module and fills it; `config_from_gguf` and `iter_tensors` are its two halves.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from openwafer.config import parse, unknown
from openwafer.models.config import ModelConfig
from openwafer.models.gguf_file import GgufFile, TensorInfo, broken
from openwafer.models.weights import Wanted, everything

_LLAMA_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = _LLAMA_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one of llama.cpp's architectures differs from the others."""

    top: dict[str, str] = field(default_factory=lambda: _LLAMA_TOP)
    block: dict[str, str] = field(default_factory=lambda: _LLAMA_BLOCK)
    block_prefix: str = "model.layers"
    # Rows of q and k are stored in pairs (x0, x_half, x1, ...) for llama.cpp's rotary kernel.
    rotary_pairs: bool = False
    # Norm weights are stored as 1 + w.
    norms_plus_one: bool = False


ARCHITECTURES = {
    "llama": Architecture(rotary_pairs=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma3": Architecture(block=_GEMMA_BLOCK, norms_plus_one=True),
    "gpt2": Architecture(top=_GPT_TOP, block=_GPT_BLOCK, block_prefix="transformer.h"),
}


def load_gguf(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model in a GGUF file, dequantised to `dtype` (default fp32)."""
    from openwafer.models.build import build
    from openwafer.models.weights import assign

    file = GgufFile(path)
    config = config_of(file)
    with torch.device("meta"):
        module = build(config)
    return assign(module, _tensors(file, config), str(path), dtype)


def config_from_gguf(path: Path) -> ModelConfig:
    """The model's shape, from the file's metadata and checked against its tensors.

    The tensors lie within the file, so no metadata can make us describe a model of an absurd size.
    """
    return config_of(GgufFile(path))


def kinds_of(file: GgufFile) -> dict[str, str]:
    """How each weight is stored, such as Q4_1."""
    architecture = ARCHITECTURES[_architecture(file)]
    return {_our_name(file, info.name, architecture): info.type_name for info in _weights(file)}


def iter_tensors(file: GgufFile, wanted: Wanted = everything) -> Iterator[tuple[str, torch.Tensor]]:
    """(our name, fp32 tensor) for each wanted weight, dequantised one at a time."""
    return _tensors(file, config_of(file), wanted)


@dataclass(frozen=True, kw_only=True, eq=False)
class RawTensor:
    """A weight as it is stored, its rows in our order."""

    type_name: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 [rows, bytes of a row]


def iter_raw(file: GgufFile, wanted: Wanted = everything) -> Iterator[tuple[str, RawTensor | torch.Tensor]]:
    """(our name, weight) for each wanted weight: matrices as they are stored, vectors as fp32 tensors."""
    config = config_of(file)
    architecture = ARCHITECTURES[_architecture(file)]
    for info in _weights(file):
        name = _our_name(file, info.name, architecture)
        if not wanted(name):
            continue
        if len(info.shape) != 2:
            yield name, torch.from_numpy(_values(file, info, config))
            continue
        data = _our_rows(file, info, config, file.raw(info))
        yield name, RawTensor(type_name=info.type_name, shape=info.shape, data=data)
        del data
        file.forget(info)


def _architecture(file: GgufFile) -> str:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        file.fail(unknown(f"architecture {name!r}", str(name), ARCHITECTURES))
    return name


def config_of(file: GgufFile) -> ModelConfig:
    """As `config_from_gguf`, of a file that is open."""
    name = _architecture(file)
    if _number(file, "expert_count", 0):
        file.fail("it is a mixture of experts, which is not supported")
    vocab_size, hidden_size = _shape(file, "token_embd.weight")
    layers = {match[1] for key in file.tensors if (match := re.match(r"blk\.(\d+)\.", key))}
    _agree(file, "embedding_length", hidden_size, "token_embd.weight")
    _agree(file, "block_count", len(layers), "the blk.N tensors")
    _agree(file, "feed_forward_length", _shape(file, "blk.0.ffn_up.weight")[0], "blk.0.ffn_up.weight")
    values = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": len(layers),
        "num_heads": _number(file, "attention.head_count"),
        "intermediate_size": _number(file, "feed_forward_length"),
        "max_position_embeddings": _number(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    more = _gpt_values(file) if name == "gpt2" else _llama_values(file, values)
    return parse(ModelConfig, values | more, where=str(file.path))


def _gpt_values(file: GgufFile) -> dict[str, Any]:
    _agree(file, "context_length", _shape(file, "position_embd.weight")[0], "position_embd.weight")
    return {"family": "gpt", "norm_eps": _number(file, "attention.layer_norm_epsilon")}


def _llama_values(file: GgufFile, common: dict[str, Any]) -> dict[str, Any]:
    heads = common["num_heads"]
    values: dict[str, Any] = {
        "family": "llama",
        "norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "num_kv_heads": _number(file, "attention.head_count_kv", heads),
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }
    if (key_length := _number(file, "attention.key_length", None)) is not None:
        values["head_dim"] = key_length
    head_dim = key_length or common["hidden_size"] // max(heads, 1)
    if _number(file, "attention.value_length", head_dim) != head_dim:
        file.fail("its keys and values have heads of different sizes, which is not supported")
    if _number(file, "rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        file.fail(f"rotary positions on a part of each head ({head_dim} wide) are not supported")
    for tensor, count in (("blk.0.attn_q.weight", heads), ("blk.0.attn_k.weight", values["num_kv_heads"])):
        if (rows := _shape(file, tensor)[0]) != count * head_dim:
            file.fail(f"{tensor} has {rows} rows, not {count} heads of {head_dim}")
    values["rope_scaling"] = _rope_scaling(file, values["rope_theta"], head_dim)
    if file.metadata["general.architecture"] == "gemma3":
        values |= _gemma_values(file, common)
    return values


def _gemma_values(file: GgufFile, common: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "activation": "gelu_tanh",
        "gemma_norms": True,
        "rope_theta": _number(file, "rope.freq_base", 1_000_000.0),
        # Not always in the file: all Gemma 3 models have these two.
        "rope_local_theta": _number(file, "rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": 6,
        "sliding_window": _number(file, "attention.sliding_window"),
    }
    if common["num_hidden_layers"] == 62:
        # The 27B scales q·k by the width per head (168), not by its head size (128); the file does not say.
        values["attention_scale"] = (common["hidden_size"] / max(common["num_heads"], 1)) ** -0.5
    return values


def _rope_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        file.fail(f"rotary scaling {kind!r} is not supported; linear and Llama 3's are")
    factor = _number(file, "rope.scaling.factor", 1.0)
    if kind == "linear" and factor != 1:
        return {"kind": "linear", "factor": factor}
    if "rope_freqs.weight" not in file.tensors:
        return None
    # Llama 3.1 and later store the divisor of each frequency, not the rule that gave it. All of them use one
    # rule and differ in its factor, the largest divisor; the rule is taken only if it gives all divisors.
    divisors = file.float32(file.tensors["rope_freqs.weight"]).astype(np.float64)
    rule = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if divisors.shape != (head_dim // 2,) or not (np.isfinite(divisors) & (divisors > 0.99)).all():
        file.fail(f"rope_freqs.weight does not hold {head_dim // 2} numbers from 1 on")
    if np.allclose(divisors, 1):
        return None
    factor = float(divisors.max())
    if not np.allclose(divisors, _llama3_divisors(theta, head_dim, factor, **rule), rtol=1e-3):
        file.fail("its rope_freqs.weight does not follow Llama 3's rule, the one that is supported")
    return {"kind": "llama3", "factor": round(factor, 4), **rule}


def _llama3_divisors(
    theta: float,
    head_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    wavelength = 2 * math.pi * max(theta, 1.0) ** (np.arange(0, head_dim, 2) / head_dim)
    turns = original_max_position_embeddings / wavelength
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _tensors(file: GgufFile, config: ModelConfig, wanted: Wanted = everything) -> Iterator[tuple[str, torch.Tensor]]:
    architecture = ARCHITECTURES[_architecture(file)]
    for info in _weights(file):
        name = _our_name(file, info.name, architecture)
        if wanted(name):
            yield name, torch.from_numpy(_values(file, info, config))
            file.forget(info)


def _weights(file: GgufFile) -> Iterator[TensorInfo]:
    for info in file.tensors.values():
        # Not weights: the rotary frequencies, which the module computes from the config.
        if info.name != "rope_freqs.weight" and not info.name.endswith("attn_rot_embd.weight"):
            yield info


def _values(file: GgufFile, info: TensorInfo, config: ModelConfig) -> np.ndarray:
    values = file.float32(info)
    if ARCHITECTURES[_architecture(file)].norms_plus_one and info.name.endswith("norm.weight"):
        values -= 1
    return _our_rows(file, info, config, values)


def _our_rows(file: GgufFile, info: TensorInfo, config: ModelConfig, values: np.ndarray) -> np.ndarray:
    """`values` with the rows of q and k in our order; rows are values or their bytes."""
    match = re.search(r"\.attn_([qk])\.(weight|bias)$", info.name)
    if match is None or not ARCHITECTURES[_architecture(file)].rotary_pairs:
        return values
    return _unpaired(values, config.num_heads if match[1] == "q" else config.kv_heads, file.path)


def _our_name(file: GgufFile, name: str, architecture: Architecture) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    table = architecture.top if match and match[1] is None else architecture.block
    if match is None or match[2] not in table:
        file.fail(f"tensor {name!r} is not part of a {file.metadata['general.architecture']} model")
    prefix = "" if match[1] is None else f"{architecture.block_prefix}.{match[1]}."
    return f"{prefix}{table[match[2]]}.{match[3]}"


def _unpaired(values: np.ndarray, num_heads: int, path: Path) -> np.ndarray:
    """Rows of each head from rotary pairs (0, half, 1, half + 1, ...) back to (0, 1, ..., half, ...)."""
    if values.shape[0] % (2 * num_heads):
        raise broken(path, f"{values.shape[0]} rows do not make {num_heads} heads of an even size")
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


_REQUIRED = object()


def _number(file: GgufFile, key: str, default: Any = _REQUIRED) -> Any:
    """A number of the model's metadata; one value where llama.cpp allows one per layer."""
    key = f"{_architecture(file)}.{key}"
    value = file.metadata.get(key, default)
    if value is _REQUIRED:
        file.fail(f"its metadata has no {key}")
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if value is not default and (isinstance(value, bool) or not isinstance(value, (int, float))):
        file.fail(f"{key} must be a number, the same for all layers, got {str(value)[:60]!r}")
    if isinstance(value, float) and not math.isfinite(value):
        file.fail(f"{key} is {value}")
    return value


def _shape(file: GgufFile, name: str) -> tuple[int, int]:
    if name not in file.tensors:
        file.fail(f"tensor {name!r} is missing")
    shape = file.tensors[name].shape
    if len(shape) != 2:
        file.fail(f"tensor {name!r} has shape {shape}, not two dimensions")
    return shape[0], shape[1]


def _agree(file: GgufFile, key: str, found: int, where: str) -> None:
    if (stated := _number(file, key)) != found:
        file.fail(f"its metadata says {key} = {stated}, {where} says {found}")
