"""Our modules against transformers', on random tiny models that transformers itself saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from openwafer.errors import UserError
from openwafer.models.huggingface import config_from_folder, iter_tensors, load_folder

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61}


def reference(name: str) -> Any:
    """A transformers model whose logits depend visibly on everything it is configured with."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "gpt2": ("GPT2", {**GPT2, "initializer_range": 0.3}),
        "llama": ("Llama", {**SMALL, "rope_parameters": LLAMA3}),
        "llama_linear_tied": ("Llama", {**SMALL, "rope_parameters": LINEAR, "tie_word_embeddings": True}),
        "mistral": ("Mistral", {**SMALL, "sliding_window": 5, "head_dim": 8}),
        "qwen2": ("Qwen2", SMALL),
        "qwen3": ("Qwen3", {**SMALL, "head_dim": 12}),
        "gemma3_text": (
            "Gemma3",
            {
                **SMALL,
                "num_hidden_layers": 6,
                "head_dim": 12,
                "sliding_window": 5,
                "sliding_window_pattern": 3,
                "query_pre_attn_scalar": 20,
                "rope_parameters": GEMMA_ROPE,
            },
        ),
    }
    prefix, settings = kinds[name]
    config_class = getattr(transformers, f"{prefix}{'Text' if prefix == 'Gemma3' else ''}Config")
    model_class = getattr(transformers, f"{prefix}{'LMHeadModel' if prefix == 'GPT2' else 'ForCausalLM'}")
    torch.manual_seed(0)
    model = model_class(config_class(**settings)).eval()
    # Norm weights and biases start as constants, which would hide a swap of two of them.
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


NAMES = ["gpt2", "llama", "llama_linear_tied", "mistral", "qwen2", "qwen3", "gemma3_text"]


def ids(tokens: int = 24) -> torch.Tensor:
    return torch.randint(0, 61, (2, tokens), generator=torch.Generator().manual_seed(1))


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_and_loss_equal_transformers(name: str, tmp_path: Path):
    model = reference(name)
    ours = load_folder(save(model, tmp_path)).eval()
    expected = model(ids()).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(ids()), expected, atol=2e-5, rtol=1e-5)

    labels = ids().roll(-1, dims=1)
    labels[:, -1] = -100
    labels[0, :7] = -100
    shifted_back = torch.cat((torch.full((2, 1), -100), labels[:, :-1]), dim=1)
    mean = model(ids(), labels=shifted_back).loss
    loss_sum, count = ours(ids(), labels)
    assert loss_sum.dtype == torch.float32
    assert count.dtype == torch.int64
    assert count == 2 * 23 - 7
    torch.testing.assert_close(loss_sum / count, mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_of_transformers(name: str, tmp_path: Path):
    model = reference(name)
    ours = load_folder(save(model, tmp_path))
    theirs = {key: tensor.shape for key, tensor in model.state_dict().items()}
    mine = {
        key: tensor.t().shape if name == "gpt2" and ".c_" in key and tensor.dim() == 2 else tensor.shape
        for key, tensor in ours.state_dict().items()
    }
    assert mine == theirs


def test_old_spelling_of_the_configuration(tmp_path: Path):
    folder = save(reference("llama"), tmp_path)
    new = config_from_folder(folder)
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": raw.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(raw))
    assert config_from_folder(folder) == new
    raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    (folder / "config.json").write_text(json.dumps(raw))
    assert config_from_folder(folder) == new


def test_gemma3_configuration_as_published_leaves_out_defaults(tmp_path: Path):
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "sliding_window": 1024,
    }
    text |= {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = config_from_folder(tmp_path)
    assert (config.num_heads, config.kv_heads, config.head_size) == (8, 4, 256)
    assert (config.rope_theta, config.rope_local_theta) == (1e6, 1e4)
    assert [config.is_sliding(layer) for layer in range(7)] == [True] * 5 + [False, True]
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 8.0)
    assert config.attention_scale == 256**-0.5
    assert config.tied


@pytest.mark.parametrize("prefixes", [("language_model.model.", ""), ("model.language_model.", "model.")])
@torch.no_grad()
def test_the_text_half_of_a_multimodal_gemma3(prefixes: tuple[str, str], tmp_path: Path):
    model = reference("gemma3_text")
    folder = save(model, tmp_path)
    body, vision = prefixes
    stored = load_file(folder / "model.safetensors")
    renamed = {body + name.removeprefix("model."): tensor for name, tensor in stored.items()}
    renamed[f"{vision}vision_tower.patch.weight"] = torch.ones(3)
    renamed[f"{vision}multi_modal_projector.weight"] = torch.ones(3)
    save_file(renamed, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(raw))
    torch.testing.assert_close(load_folder(folder)(ids()), model(ids()).logits, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_gpt2_as_first_published_has_no_prefix_and_mask_buffers(tmp_path: Path):
    model = reference("gpt2")
    folder = save(model, tmp_path)
    stored = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    renamed["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(renamed, folder / "model.safetensors")
    torch.testing.assert_close(load_folder(folder).eval()(ids()), model(ids()).logits, atol=2e-5, rtol=1e-5)


def test_sharded_equals_unsharded(tmp_path: Path):
    model = reference("llama")
    whole = load_folder(save(model, tmp_path / "whole"))
    folder = save(model, tmp_path / "shards", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    shards = load_folder(folder).state_dict()
    assert shards.keys() == whole.state_dict().keys()
    assert all(torch.equal(shards[name], tensor) for name, tensor in whole.state_dict().items())


def test_dtype_is_the_configured_one_or_the_asked_one(tmp_path: Path):
    folder = save(reference("llama").to(torch.bfloat16), tmp_path)
    ours = load_folder(folder)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in ours.buffers()} == {torch.float32}
    assert {parameter.dtype for parameter in load_folder(folder, torch.float32).parameters()} == {torch.float32}


def test_tensors_come_lazily(tmp_path: Path):
    """The first tensor is there before the second shard is even opened."""
    folder = save(reference("llama"), tmp_path, max_shard_size="20KB")
    sorted(folder.glob("*.safetensors"))[1].write_bytes(b"broken")
    tensors = iter_tensors(folder)
    assert next(tensors)[1].dtype == torch.float32
    with pytest.raises(UserError, match=r"00002-of-.*not a readable safetensors file"):
        list(tensors)


def remove_tensor(file: Path, name: str, **replacement: torch.Tensor) -> None:
    tensors = load_file(file)
    del tensors[name]
    save_file({**tensors, **replacement}, file)


def test_missing_extra_and_misshapen_tensors(tmp_path: Path):
    folder = save(reference("llama"), tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    remove_tensor(file, "model.norm.weight")
    with pytest.raises(UserError, match=r"missing: model\.norm\.weight"):
        load_folder(folder)
    remove_tensor(file, "lm_head.weight", **{"model.norm.weight": torch.ones(32), "extra": torch.ones(3)})
    with pytest.raises(UserError, match=r"tensor 'extra' has no place"):
        load_folder(folder)
    file.write_bytes(whole)
    remove_tensor(file, "model.norm.weight", **{"model.norm.weight": torch.ones(31)})
    with pytest.raises(UserError, match=r"'model\.norm\.weight' has shape \[31\], the model needs \[32\]"):
        load_folder(folder)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_file(size: int, tmp_path: Path):
    file = save(reference("gpt2"), tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match=r"model\.safetensors is not a readable safetensors file"):
        load_folder(tmp_path)


def test_broken_shards_and_index(tmp_path: Path):
    folder = save(reference("llama"), tmp_path, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first = good["weight_map"]["lm_head.weight"]
    edit_json(index, weight_map={**good["weight_map"], "lm_head.weight": "../other.safetensors"})
    with pytest.raises(UserError, match=r"'lm_head\.weight' must name a file of the same folder"):
        load_folder(folder)
    edit_json(index, weight_map={**good["weight_map"], "ghost": first})
    with pytest.raises(UserError, match=rf"{first} has no tensor 'ghost'"):
        load_folder(folder)
    edit_json(index, weight_map=[])
    with pytest.raises(UserError, match="no weight_map"):
        load_folder(folder)
    edit_json(index, **good)
    (folder / first).unlink()
    with pytest.raises(UserError, match=rf"{first} is missing"):
        load_folder(folder)
    index.unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors\.index\.json"):
        load_folder(folder)


def test_only_pickled_weights(tmp_path: Path):
    folder = save(reference("gpt2"), tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled weights \(pytorch_model\.bin\).*convert them"):
        load_folder(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors file"):
        load_folder(folder)


def test_no_folder_no_config_broken_json(tmp_path: Path):
    with pytest.raises(UserError, match="no such folder"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no such file: .*config\.json"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="must hold a JSON object"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba' is not supported; supported: llama, mistral"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"supported: LlamaForCausalLM"),
        ({"architectures": 3}, "architectures must be a list"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
        ({"hidden_act": ["silu"]}, "hidden_act must be text"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3 does not divide"),
    ],
)
def test_what_a_configuration_may_not_say(changes: dict[str, Any], message: str, tmp_path: Path):
    raw = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL, **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=message) as caught:
        config_from_folder(tmp_path)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("types", "window", "pattern"),
    [("ssfssf", 4, 3), ("ssssss", 4, None), ("ffffff", None, None), ("sfsfsf", 4, 2), ("ssfsss", 4, "error")],
)
def test_layer_types(types: str, window: int | None, pattern: Any, tmp_path: Path):
    words = {"s": "sliding_attention", "f": "full_attention"}
    raw = {**SMALL, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4}
    raw |= {"num_hidden_layers": 6, "layer_types": [words[letter] for letter in types]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if pattern == "error":
        with pytest.raises(UserError, match=r"layers \[2\] see everything"):
            config_from_folder(tmp_path)
        return
    config = config_from_folder(tmp_path)
    assert (config.sliding_window, config.sliding_window_pattern) == (window, pattern)
    assert "".join("fs"[config.is_sliding(layer)] for layer in range(6)) == types
