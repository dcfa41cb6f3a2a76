"""What a Hugging Face `config.json` means in our terms, old and new spellings alike.

Whatever our modules do not compute is refused here by name: a model must not load and then be subtly wrong.
"""

import json
from pathlib import Path
from typing import Any

from openwafer.config import parse
from openwafer.errors import UserError
from openwafer.models.config import ModelConfig

# Values that `config.json` may leave out, by model_type; the same as in the transformers library.
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "sliding_window": None,
}
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_GEMMA = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "sliding_window": 4096,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, **_MISTRAL, "sliding_window": 4096},
    "qwen2": {**_LLAMA, **_QWEN, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {**_LLAMA, **_QWEN, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    "gemma3_text": {**_LLAMA, **_GEMMA},
    "gpt2": {},
}
_DEFAULTS["gemma3"] = _DEFAULTS["gemma3_text"]
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "gemma3_text": ("Gemma3ForCausalLM",),
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
# Settings that change what is computed, each with the values (besides absent or null) that we compute.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (),
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def config_from(raw: dict[str, Any], where: Path) -> ModelConfig:
    """The ModelConfig of the contents of a `config.json`; `where` is its path, for errors."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFAULTS:
        raise UserError(f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(_DEFAULTS)}")
    known = _ARCHITECTURES[model_type]
    _check_types(raw, where)
    given = raw.get("architectures") or known
    if not any(name in known for name in given):
        raise UserError(
            f"{where}: architectures {given!r} is not supported; supported: "
            + ", ".join(name for names in _ARCHITECTURES.values() for name in names)
        )
    if model_type == "gemma3":
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise UserError(f"{where}: gemma3 needs a text_config object, got {text!r}")
        _check_types(text, where)
        above = ("tie_word_embeddings", "quantization_config")
        raw = text | {key: raw[key] for key in above if key in raw}
    settings = {**_DEFAULTS[model_type], **raw}
    for key, allowed in _SUPPORTED_VALUES.items():
        if settings.get(key) is not None and settings[key] not in allowed:
            raise UserError(f"{where}: {key} {settings[key]!r} is not supported by openwafer's {model_type}")
    try:
        fields = _gpt(settings) if model_type == "gpt2" else _llama(settings, model_type)
        return parse(ModelConfig, fields)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _check_types(raw: dict[str, Any], where: Path) -> None:
    """The values that are looked into here; `parse` checks the rest."""
    wanted: dict[str, tuple[tuple[type, ...], str]] = {
        **dict.fromkeys(("architectures", "layer_types"), ((list,), "a list")),
        **dict.fromkeys(("rope_parameters", "rope_scaling", "text_config"), ((dict,), "an object")),
        **dict.fromkeys(("num_hidden_layers", "max_window_layers"), ((int,), "a whole number")),
        **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ((str,), "text")),
        "query_pre_attn_scalar": ((int, float), "a number"),
    }
    for key, (types, words) in wanted.items():
        if raw.get(key) is not None and not isinstance(raw[key], types):
            raise UserError(f"{where}: {key} must be {words}, got {raw[key]!r}")
    for key in ("full_attention", "sliding_attention"):
        nested = (raw.get("rope_parameters") or {}).get(key)
        if not isinstance(nested, (dict, type(None))):
            raise UserError(f"{where}: rope_parameters.{key} must be an object, got {nested!r}")


def _gpt(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "family": "gpt",
        "hidden_size": settings.get("n_embd", 768),
        "num_hidden_layers": settings.get("n_layer", 12),
        "num_heads": settings.get("n_head", 12),
        "intermediate_size": settings.get("n_inner"),
        "vocab_size": settings.get("vocab_size", 50257),
        "max_position_embeddings": settings.get("n_positions", 1024),
        "activation": _activation(settings.get("activation_function", "gelu_new")),
        "norm_eps": settings.get("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": settings.get("tie_word_embeddings", True),
        # One rate here, three there; they are equal in every published model.
        "dropout": settings.get("resid_pdrop", 0.1),
        "attention_scale": None if settings.get("scale_attn_weights", True) else 1.0,
    }


def _llama(settings: dict[str, Any], model_type: str) -> dict[str, Any]:
    gemma = model_type.startswith("gemma3")
    window, pattern = _window(settings, model_type)
    full, local = _rope(settings, gemma)
    fields = {
        "family": "llama",
        "hidden_size": settings["hidden_size"],
        "num_hidden_layers": settings["num_hidden_layers"],
        "num_heads": settings["num_attention_heads"],
        "num_kv_heads": settings["num_key_value_heads"],
        "head_dim": settings["head_dim"],
        "intermediate_size": settings["intermediate_size"],
        "vocab_size": settings["vocab_size"],
        "max_position_embeddings": settings["max_position_embeddings"],
        "activation": _activation(settings["hidden_activation" if gemma else "hidden_act"]),
        "norm_eps": settings["rms_norm_eps"],
        "tie_word_embeddings": settings["tie_word_embeddings"],
        "qkv_bias": model_type == "qwen2",
        "qk_norm": gemma or model_type == "qwen3",
        "rope_theta": full.pop("theta"),
        "rope_scaling": full or None,
        "rope_local_theta": local,
        "sliding_window": window,
        "sliding_window_pattern": pattern,
        "gemma_norms": gemma,
    }
    if gemma:
        fields["attention_scale"] = float(settings.get("query_pre_attn_scalar", 256)) ** -0.5
    return fields


def _activation(name: Any) -> str:
    if name not in _ACTIVATIONS:
        raise UserError(f"activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _window(settings: dict[str, Any], model_type: str) -> tuple[int | None, int | None]:
    """(sliding_window, sliding_window_pattern) from any of the ways to say which layers slide."""
    window, num_layers = settings["sliding_window"], settings["num_hidden_layers"]
    gemma = model_type.startswith("gemma3")
    if model_type.startswith("qwen") and not settings.get("use_sliding_window", False):
        return None, None
    if window is None or model_type == "llama":
        return None, None
    if model_type == "mistral":
        return window, None
    types = settings.get("layer_types")
    if types is None and gemma:
        return window, settings.get("sliding_window_pattern", 6)
    if types is None:
        first = settings.get("max_window_layers", 28)
        types = [f"{'sliding' if index >= first else 'full'}_attention" for index in range(num_layers)]
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    if len(full) == num_layers:
        return None, None
    pattern = full[0] + 1 if full else None
    if full != list(range(full[0], num_layers, full[0] + 1) if full else []):
        raise UserError(f"layers {full} see everything and the others slide: only every N-th layer may, or none")
    return window, pattern


def _rope(settings: dict[str, Any], gemma: bool) -> tuple[dict[str, Any], float | None]:
    """The global rope (`theta` and the fields of RopeScaling, if it is scaled), and the local theta."""
    local = settings.get("rope_local_base_freq", 10000.0) if gemma else None
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if gemma and "full_attention" in parameters:
        sliding = parameters.get("sliding_attention") or {}
        if sliding.get("rope_type", "default") != "default":
            raise UserError(f"rope_type {sliding['rope_type']!r} is not supported on sliding layers")
        local = sliding.get("rope_theta", local)
        parameters = parameters["full_attention"] or {}
    rope = {"theta": parameters.get("rope_theta") or settings["rope_theta"]}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3")
    partial = parameters.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UserError(f"partial_rotary_factor {partial!r} is not supported; supported: 1.0")
    if kind != "default":
        names = ["factor"]
        if kind == "llama3":
            names += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
        if missing := [name for name in names if name not in parameters]:
            raise UserError(f"rope_type {kind!r} needs {', '.join(missing)}")
        rope |= {"kind": kind, **{name: parameters[name] for name in names}}
    return rope, local
