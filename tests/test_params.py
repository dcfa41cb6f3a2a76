"""Params files: presets, the vendor's three lines, flags over file, and every mistake in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from openwafer.errors import UserError
from openwafer.params import SECTIONS, build_params, find_params, load_params

THREE = {"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 16}


def test_three_lines_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "gpt3_1b_params.yaml"
    path.write_text("### GPT-3 XL 1.3B\n\nhidden_size: 2048\nnum_hidden_layers: 24\nnum_heads: 16\n")
    params = load_params(path)
    assert (params.model.hidden_size, params.model.num_hidden_layers, params.model.num_heads) == (2048, 24, 16)
    assert params.train.num_steps == 1000


@pytest.mark.parametrize("preset", sorted(p.stem for p in (Path(__file__).parents[1] / "params").glob("*.yaml")))
def test_every_preset_loads_by_name_and_by_path(preset: str) -> None:
    assert load_params(preset) == load_params(find_params(preset))


def test_flat_keys_find_their_section() -> None:
    params = build_params({**THREE, "num_steps": 7, "lr": "3e-4", "optimizer": {"weight_decay": 0}, "context": 64})
    assert params.train.num_steps == 7
    assert params.optimizer.lr == 3e-4
    assert params.optimizer.weight_decay == 0
    assert params.data.context == 64
    assert build_params({**THREE, "vocab_size": 500}).model.vocab_size == 500


def test_flags_win_over_the_file() -> None:
    params = build_params({**THREE, "train": {"num_steps": 7, "seed": 3}}, {"train": {"num_steps": 9}})
    assert (params.train.num_steps, params.train.seed) == (9, 3)


def test_as_json_is_a_params_file() -> None:
    groups = [{"match": ["*.bias", "*norm*"], "lr_scale": 0.5}, {"match": "lm_head.weight", "frozen": True}]
    schedule = {
        "kind": "sequence",
        "parts": [{"kind": "linear", "steps": 5, "start": 0, "end": 1}, {"kind": "constant"}],
    }
    optimizer = {"kind": "sgd", "groups": groups, "loss_scale": "dynamic"}
    sections = {"optimizer": optimizer, "schedule": schedule}
    params = build_params({**THREE, **sections, "model_dir": "out", "max_grad_norm": 1})
    assert build_params(yaml.safe_load(yaml.safe_dump(params.as_json()))) == params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 3}, r"unknown key 'hiden_size': did you mean 'hidden_size'\?"),
        ({"model": {"hidden_sizes": 3}}, r"unknown key 'model\.hidden_sizes': did you mean 'hidden_size'\?"),
        ({"num_heads": 7}, "num_heads 7 does not divide hidden_size 2048"),
        ({"num_heads": "many"}, r"model\.num_heads must be a whole number, got 'many'"),
        ({"num_heads": True}, r"model\.num_heads must be a whole number, got True"),
        ({"num_steps": -5}, r"train\.num_steps must be at least 0, got -5"),
        ({"lr": float("nan")}, r"optimizer\.lr must be a number"),
        ({"kind": "linear"}, "'kind' could mean optimizer.kind or schedule.kind"),
        ({"train": 3}, "section 'train' must be a mapping"),
        ({"train": {"batch_size": 8, "micro_batch_size": 3}}, "micro_batch_size 3 does not divide batch_size 8"),
        ({"model": {"num_heads": 4}}, "'num_heads' is given twice"),
        ({"optimizer": {"max_grad_norm": 0}}, "max_grad_norm must be above 0"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_params({**THREE, **change})


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_params(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"no such file: gpt_tiney, and unknown preset .*did you mean 'gpt_tiny'\?"):
        load_params("gpt_tiney")
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    with pytest.raises(UserError, match="is empty"):
        load_params(empty)
    with pytest.raises(UserError, match=r"model\.num_heads is missing"):
        build_params({"hidden_size": 8, "num_hidden_layers": 1})


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
known_keys = st.sampled_from([*SECTIONS, *(name for cls in SECTIONS.values() for name in cls.__dataclass_fields__)])


@given(st.dictionaries(known_keys | st.text(max_size=10), values, max_size=6) | values)
def test_garbage_gives_params_or_one_sentence(mapping: Any) -> None:
    message = "fine"
    try:
        build_params(mapping)
    except UserError as error:
        message = str(error)
    assert message
    assert "\n" not in message
