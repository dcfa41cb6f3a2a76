"""A tiny model in a folder, with the tokenizer of the script server, for servers in processes of their own."""

import json
from pathlib import Path

import transformers

from tests.serve.script_server import EOS, TOKENIZER


def saved_model(folder: Path, num_layers: int) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
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
