"""The Hugging Face `config.json` of one of our models: the reverse of `huggingface_config.py`."""

from typing import Any

from openwafer.errors import UserError
from openwafer.models.config import ModelConfig

_LLAMA_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu", "relu": "relu"}
_GPT_ACTIVATIONS = {**_LLAMA_ACTIVATIONS, "gelu_tanh": "gelu_new"}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """The contents of `config.json`. In the spelling that both old and new versions of transformers read."""
    return _gpt2(config) if config.family == "gpt" else _llama(config)


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    if config.head_size * config.num_heads != config.hidden_size:
        raise _no_home(f"head_dim {config.head_size} times num_heads {config.num_heads} is not the hidden_size")
    scaled = _is_usual_scale(config)
    if not scaled and config.attention_scale != 1.0:
        raise _no_home(f"GPT-2 has no attention_scale {config.attention_scale}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_heads,
        "n_inner": config.feed_forward_size,
        "vocab_size": config.vocab_size,
        "n_positions": config.max_position_embeddings,
        "activation_function": _GPT_ACTIVATIONS[config.nonlinearity],
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "scale_attn_weights": scaled,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    }


def _llama(config: ModelConfig) -> dict[str, Any]:
    model_type = _model_type(config)
    settings: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.feed_forward_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_dropout": config.dropout,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
    }
    activation = "hidden_activation" if model_type == "gemma3_text" else "hidden_act"
    settings[activation] = _LLAMA_ACTIVATIONS[config.nonlinearity]
    settings |= _window(config, model_type)
    if model_type == "gemma3_text":
        scale = config.attention_scale or config.head_size**-0.5
        whole = round(scale**-2)
        settings["query_pre_attn_scalar"] = whole if abs(whole**-0.5 - scale) < 1e-12 else scale**-2
        settings["rope_local_base_freq"] = config.rope_local_theta or config.rope_theta
    return settings


def _model_type(config: ModelConfig) -> str:
    """The architecture that computes what our module does."""
    if config.gemma_norms:
        if not config.qk_norm or config.qkv_bias:
            raise _no_home("gemma_norms go with qk_norm and without qkv_bias in Gemma 3")
        if config.rope_local_theta is None and config.rope_scaling is not None and config.sliding_window is not None:
            raise _no_home("Gemma 3 does not scale the rotary positions of sliding layers: set rope_local_theta")
        return "gemma3_text"
    if not _is_usual_scale(config):
        raise _no_home(f"only Gemma 3 (gemma_norms) and GPT have an attention_scale, here {config.attention_scale}")
    if config.rope_local_theta is not None:
        raise _no_home("only Gemma 3 (gemma_norms) has a rope_local_theta")
    if config.qkv_bias and config.qk_norm:
        raise _no_home("qkv_bias (Qwen2) and qk_norm (Qwen3) are never together")
    if config.qkv_bias or config.qk_norm:
        return "qwen2" if config.qkv_bias else "qwen3"
    if config.sliding_window is None:
        return "llama"
    if config.sliding_window_pattern is not None:
        raise _no_home("in Mistral all layers slide: sliding_window_pattern needs Qwen's or Gemma's norms or biases")
    return "mistral"


def _window(config: ModelConfig, model_type: str) -> dict[str, Any]:
    if model_type == "llama":
        return {}
    if model_type == "mistral":
        return {"sliding_window": config.sliding_window}
    layers = range(config.num_hidden_layers)
    types = [f"{'sliding' if config.is_sliding(layer) else 'full'}_attention" for layer in layers]
    settings = {"layer_types": types, "sliding_window": config.sliding_window}
    if model_type.startswith("qwen"):
        settings |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    return settings


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", **{name: getattr(scaling, name) for name in names}}


def _is_usual_scale(config: ModelConfig) -> bool:
    return config.attention_scale is None or abs(config.attention_scale - config.head_size**-0.5) < 1e-12


def _no_home(reason: str) -> UserError:
    return UserError(f"this model has no counterpart in transformers: {reason}")
