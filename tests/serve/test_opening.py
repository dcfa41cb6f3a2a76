"""Opening a model: from each kind of source, and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from openwafer.errors import UserError
from openwafer.models.generate import generate
from openwafer.models.huggingface_export import export
from openwafer.models.load import StoredModel, load
from openwafer.serve import opening
from openwafer.serve.engine import EngineConfig, open_engine
from openwafer.serve.runner import Runner
from openwafer.serve.stage_plan import plan_stages
from tests.serve.conftest import CONFIGS, Answer, Client, stored, tiny_module

PROMPT = np.random.default_rng(0).integers(0, 101, 9).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a Hugging Face folder."""
    out = tmp_path_factory.mktemp("models") / "tiny"
    export(stored(tiny_module(CONFIGS["llama"])), out, dtype=torch.float32)
    return out


def answer(source: Path, **options) -> Answer:
    engine, _, _ = open_engine(source, EngineConfig(**{"num_threads": 1, "max_running": 4} | options))
    try:
        return Client(engine).ask(PROMPT, max_tokens=12)  # pyright: ignore[reportArgumentType]
    finally:
        engine.close()


def test_a_folder_is_served(folder: Path) -> None:
    module, _ = load(folder)
    expected = list(generate(module, PROMPT, max_tokens=12))
    assert answer(folder).tokens == expected
    # The model guesses for itself.
    assert answer(folder, speculation="draft", draft_model=str(folder)).tokens == expected


def test_without_a_compiler_the_definition_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(folder).tokens
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("OPENWAFER_CACHE", str(tmp_path))
    assert answer(folder).tokens == expected
    assert "no C compiler" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_cache": 100}, "kv_cache 100 is too small"),
        ({"dram": 400}, "dram 400 is too small: keys and values get 100 bytes of it"),
        ({"max_context": 1000}, "max_context 1000 is more than the model"),
        ({"speculation": "draft"}, "needs a draft_model"),
        ({"draft_model": "small"}, "draft_model small is not used with speculation none: give --speculation draft"),
        ({"num_csx": 3}, "num_csx 3 is more than the 2 layers"),
        ({"device_memory": "1GiB"}, "device_memory 1073741824 is for --device cuda"),
        ({"dram": 1000, "kv_cache": 70_000}, r"dram 1000 bytes is too small: .* are needed"),
        pytest.param(
            {"device": "cuda"},
            "sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_is_told(folder: Path, options: dict, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        open_engine(folder, EngineConfig(**options))


def test_the_least_budget_that_is_told_is_enough_where_the_cache_grows_with_it() -> None:
    model = stored(tiny_module(dataclasses.replace(CONFIGS["llama"], num_hidden_layers=8)))
    options = {"max_step_tokens": 2, "max_running": 60}
    with pytest.raises(UserError, match=r"dram 136\.7 KiB is too small") as told:
        plan_stages(model, EngineConfig(dram=140_000, **options))
    least = int(str(told.value).split("--dram ")[1].split(",")[0])
    (plan,) = plan_stages(model, EngineConfig(dram=least, **options))
    assert plan.num_blocks > 1


def test_streamed_answers_are_those_of_memory(tmp_path: Path) -> None:
    """Through the front door, where the least budget that is told is enough."""
    folder = tmp_path / "deep"
    module = tiny_module(dataclasses.replace(CONFIGS["llama"], num_hidden_layers=8))
    export(stored(module), folder, dtype=torch.float32)
    options = {"kv_cache": 70_000, "max_step_tokens": 2, "max_running": 1}
    with pytest.raises(UserError) as told:
        answer(folder, dram=1000, **options)
    least = int(str(told.value).split("--dram ")[1].split(",")[0])
    streamed = answer(folder, dram=least, flash=tmp_path / "flash", **options)
    assert streamed.tokens == answer(folder).tokens
    assert (tmp_path / "flash" / ".lock").exists()


def test_a_draft_must_share_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    export(stored(tiny_module(CONFIGS["gpt"])), tmp_path / "gpt", dtype=torch.float32)
    small = tmp_path / "gpt" / "config.json"
    small.write_text(small.read_text().replace('"vocab_size": 101', '"vocab_size": 90'))
    with pytest.raises(UserError, match="90 token ids, the model 101"):
        open_engine(folder, EngineConfig(speculation="draft", draft_model=str(tmp_path / "gpt")))


def test_a_draft_that_cannot_be_opened_leaves_no_model_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_runner = opening.open_runner
    opened: list[Runner] = []
    closed: list[Runner] = []

    def open_one(model: StoredModel, config: EngineConfig, *_: object) -> Runner:
        if opened:
            raise UserError("no room for the draft")
        opened.append(open_runner(model, config))
        monkeypatch.setattr(opened[0], "close", lambda: closed.append(opened[0]))
        return opened[0]

    monkeypatch.setattr(opening, "open_runner", open_one)
    with pytest.raises(UserError, match="no room for the draft"):
        open_engine(folder, EngineConfig(speculation="draft", draft_model=str(folder), num_threads=1, kv_cache=70_000))
    assert closed == opened
    monkeypatch.undo()
    opened[0].close()
