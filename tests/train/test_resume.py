"""Which changes a checkpoint allows: each key of a run is refused, said or free."""

import copy
import json
from typing import Any

import pytest

from openwafer.errors import UserError
from openwafer.params import build_params
from openwafer.train.resume import changes

MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 280, "max_position_embeddings": 8}


def given(**sections: dict[str, Any]) -> dict[str, Any]:
    return build_params({"model": {**MODEL, **sections.pop("model", {})}, **sections}).as_json()


BEFORE = json.loads(json.dumps(given()))  # as a checkpoint has it


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"num_hidden_layers": 3}}, r"x holds another model \(num_hidden_layers was 2, is 3\)"),
        ({"optimizer": {"kind": "lion"}}, r"x was trained with the optimizer adamw, not lion"),
        ({"train": {"seed": 4}}, r"x was trained with another seed \(seed was 0, is 4\)"),
    ],
)
def test_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        changes("x", 10, BEFORE, given(**sections))


@pytest.mark.parametrize(
    ("section", "key", "value", "effect"),
    [
        ("train", "batch_size", 64, "another place"),
        ("data", "path", "elsewhere", "another place"),
        ("data", "context", 4, "another place"),
        ("train", "micro_batch_size", 2, "differs"),
        ("optimizer", "weight_decay", 0.5, "differs"),
        ("optimizer", "eps", 1e-6, "differs"),
        ("optimizer", "max_grad_norm", 2.0, "differs"),
        ("optimizer", "groups", [{"match": "*.bias", "weight_decay": 0.1}], "differs"),
    ],
)
def test_said_in_one_line(section: str, key: str, value: Any, effect: str) -> None:
    (line,) = changes("x", 10, BEFORE, given(**{section: {key: value}}))
    assert line.startswith(f"changed since x: {key} was ")
    assert effect in line


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("optimizer", {"lr": 0.5}),
        ("schedule", {"warmup_steps": 3}),
        ("train", {"num_steps": 9, "checkpoint_every": 2, "keep_checkpoints": 1, "model_dir": "y", "log_every": 5}),
        ("train", {"eval_every": 3, "eval_batches": 2, "mode": "train_and_eval"}),
        ("memoryx", {"dram": "1GiB", "flash": "f"}),
        ("train", {"mode": "eval", "seed": 3, "batch_size": 2}),
    ],
)
def test_free(section: str, values: dict[str, Any]) -> None:
    assert changes("x", 10, BEFORE, given(**{section: values})) == []


def test_a_micro_batch_that_the_device_chose_is_no_change() -> None:
    before = {**BEFORE, "train": {**BEFORE["train"], "micro_batch_size": 4, "device": "cuda"}}
    now = {**BEFORE, "train": {**BEFORE["train"], "device": "cuda"}}
    assert changes("x", 10, before, now) == []
    (line,) = changes("x", 10, before, {**BEFORE, "train": {**now["train"], "micro_batch_size": 2}})
    assert "micro_batch_size was 4, is 2" in line


def test_a_checkpoint_of_weights_alone_says_nothing() -> None:
    imported = {"model": copy.deepcopy(BEFORE["model"])}
    assert changes("x", 0, imported, given(train={"seed": 3})) == []
    assert changes("x", 0, BEFORE, given(optimizer={"kind": "lion"}, train={"seed": 3, "batch_size": 5})) == []
    assert changes("x", 10, imported, given(train={"seed": 3})) == []
    with pytest.raises(UserError, match="holds another model"):
        changes("x", 0, imported, given(model={"hidden_size": 64}))


def test_what_went_through_a_file_is_the_same() -> None:
    """Where tuples have become lists."""
    sections = {"optimizer": {"groups": [{"match": ["*.bias", "*.ln.*"], "weight_decay": 0.1}]}}
    assert changes("x", 10, json.loads(json.dumps(given(**sections))), given(**sections)) == []
