"""GGUF files made on the spot, from tiny Hugging Face models and tiny vocabularies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

WriteGguf = Callable[..., Path]

# A byte-level alphabet is enough of a vocabulary for a test; 0 and 1 begin and end a text.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """`write_gguf(architecture, metadata, tensors)`; a tensor is an array or (array, quantisation type)."""

    def write(architecture: str, metadata: dict[str, Any], tensors: dict[str, Any], name: str = "m") -> Path:
        path = tmp_path / f"{name}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in metadata.items():
            _add(writer, key, value)
        for tensor_name, value in tensors.items():
            array, kind = value if isinstance(value, tuple) else (np.asarray(value, np.float32), None)
            writer.add_tensor(tensor_name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def tiny_llama() -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata (with a tokenizer) and tensors of a Llama with random weights, for `write_gguf`."""
    hidden, inner, heads, kv_heads, vocab = 32, 64, 4, 2, 3 + len(ALPHABET)
    metadata = {
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": inner,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", *ALPHABET, "ab"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * (1 + len(ALPHABET))],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }
    shapes = {
        "token_embd": (vocab, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    rng = torch.Generator().manual_seed(0)
    tensors = {f"{k}.weight": torch.randn(v, generator=rng).numpy() * 0.3 for k, v in shapes.items()}
    return metadata, tensors
