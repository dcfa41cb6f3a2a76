"""A model and its draft model share the memory of the host."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from openwafer.errors import UserError
from openwafer.models.huggingface_export import export
from openwafer.serve import stage_plan
from openwafer.serve.draft_budget import divide_with_draft
from openwafer.serve.engine import open_engine
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.inventory import take_inventory
from openwafer.serve.region import Region
from openwafer.serve.stage_plan import plan_stages
from tests.serve.conftest import CONFIGS, Client, stored, tiny_module

DEEP = dataclasses.replace(CONFIGS["llama"], num_hidden_layers=8)
MODEL, DRAFT = stored(tiny_module(DEEP)), stored(tiny_module(CONFIGS["llama"]))
BLOCK, BLOCK_OF_DRAFT = 8 * 4096, 2 * 4096  # bytes of 16 tokens in 8 and in 2 layers
WEIGHTS, WEIGHTS_OF_DRAFT = (take_inventory(m, EngineConfig()).total(Region.whole(m.config)) for m in (MODEL, DRAFT))


def chosen(**options) -> EngineConfig:
    given = {"max_step_tokens": 2, "max_running": 2, "kv_cache": 3 * BLOCK} | options
    return EngineConfig(**given | {"speculation": "draft", "draft_model": "small"})


def test_while_all_fits_the_draft_has_as_many_tokens() -> None:
    config, own = divide_with_draft(MODEL, DRAFT, chosen())
    assert config == chosen()
    assert (own.kv_cache, own.dram, own.num_csx) == (3 * BLOCK_OF_DRAFT, None, 1)
    (plan,), (plan_of_draft,) = plan_stages(MODEL, config), plan_stages(DRAFT, own)
    assert plan.num_blocks == plan_of_draft.num_blocks == 3


def test_a_budget_is_for_both_and_the_least_that_is_told_is_enough() -> None:
    with pytest.raises(UserError, match=r"dram 1000 is too small: .* for the draft model") as told:
        divide_with_draft(MODEL, DRAFT, chosen(dram=1000))
    (least,) = map(int, re.findall(r"--dram (\d+)", str(told.value)))
    config, _ = divide_with_draft(MODEL, DRAFT, chosen(dram=least))
    assert config.dram == least - WEIGHTS_OF_DRAFT - 3 * BLOCK_OF_DRAFT
    assert config.kv_cache == 3 * BLOCK
    (plan,) = plan_stages(MODEL, config)
    assert plan.placement is not None
    assert len(plan.placement.layers) > 4
    with pytest.raises(UserError, match="is too small"):
        divide_with_draft(MODEL, DRAFT, chosen(dram=least - 1))


def test_without_a_budget_the_draft_counts_in_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for the model, but not for both."""
    free = WEIGHTS + 3 * BLOCK + WEIGHTS_OF_DRAFT + 3 * BLOCK_OF_DRAFT
    monkeypatch.setattr(stage_plan, "available_bytes", lambda: free)
    assert divide_with_draft(MODEL, DRAFT, chosen())[0].dram is None
    monkeypatch.setattr(stage_plan, "available_bytes", lambda: free - 1)
    config, _ = divide_with_draft(MODEL, DRAFT, chosen())
    assert config.dram == (free - 1) * 4 // 5 - WEIGHTS_OF_DRAFT - 3 * BLOCK_OF_DRAFT


def test_a_streamed_model_with_a_draft_answers_the_same(tmp_path: Path) -> None:
    export(MODEL, tmp_path / "deep", dtype=torch.float32)
    export(DRAFT, tmp_path / "small", dtype=torch.float32)
    prompt = np.random.default_rng(0).integers(0, 101, 9).tolist()
    found = []
    for options in ({}, {"speculation": "draft", "draft_model": str(tmp_path / "small"), "dram": 1_500_000}):
        given = {"num_threads": 1, "max_step_tokens": 8, "max_running": 1, "kv_cache": 3 * BLOCK}
        engine, _, _ = open_engine(tmp_path / "deep", EngineConfig(**given | options, flash=tmp_path / "flash"))
        found.append(Client(engine).ask(prompt, max_tokens=12).tokens)  # pyright: ignore[reportArgumentType]
        assert (engine.stats().num_guessed_tokens > 0) == bool(options)
        engine.close()
    assert found[0] == found[1]
