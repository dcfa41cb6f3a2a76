"""A model and its draft model share the memory of GPUs, planned from sizes alone; and together they answer."""

import dataclasses

import numpy as np
import pytest

from openwafer.errors import UserError
from openwafer.models.generate import generate
from openwafer.serve import opening
from openwafer.serve.engine import LocalEngine
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu import opening as gpu_opening
from openwafer.serve.gpu.device_plan import DevicePlan, device_dtype, needs_of, plan_devices
from openwafer.serve.gpu.draft_plan import plan_with_draft
from openwafer.serve.gpu.runner import GpuRunner
from openwafer.serve.inventory import take_inventory
from openwafer.serve.speculation import DraftModel
from tests.serve.conftest import CONFIGS, Client, stored, tiny_module
from tests.serve.gpu.late_gpu import LateGpus
from tests.serve.gpu.test_device_plan import SizedGpus, least_of

MODULE = tiny_module(dataclasses.replace(CONFIGS["llama"], num_hidden_layers=8))
MODEL = stored(MODULE)
DRAFT = stored(tiny_module(CONFIGS["llama"], seed=1))
PROMPT = np.random.default_rng(1).integers(0, 101, 20).tolist()


def chosen(**options) -> EngineConfig:
    given = {"device": "cuda", "dtype": "fp32", "max_step_tokens": 16, "max_running": 2} | options
    return EngineConfig(**given | {"speculation": "draft", "draft_model": "small"})


def spent(plan: DevicePlan, config: EngineConfig) -> int:
    """Bytes of a plan of the whole model, without its reserve."""
    is_draft = plan.region.num_layers == DRAFT.config.num_hidden_layers
    model = DRAFT if is_draft else MODEL
    needs = needs_of(
        model.config, take_inventory(model, config), plan.region, config, device_dtype(config), guesses=is_draft
    )
    buffers = needs.buffers if plan.streamed_layers else 0
    return plan.resident_bytes + buffers + needs.activations + needs.cache(plan.num_blocks)


@pytest.mark.parametrize("device_memory", [None, 3 << 20, 2_700_000])
@pytest.mark.parametrize("max_running", [2, 40])
def test_both_fit_into_what_there_is(device_memory: int | None, max_running: int) -> None:
    """However many keys and values there could be."""
    total = 4 << 20
    config = chosen(device_memory=device_memory, max_running=max_running)
    limit = device_memory or int(0.92 * total)
    (plan,), draft = plan_with_draft(MODEL, DRAFT, config, SizedGpus(total))
    assert plan.limit == draft.limit <= limit  # one process
    assert spent(plan, config) + spent(draft, config) <= 0.96 * limit
    (alone,) = plan_devices(MODEL, config, SizedGpus(total))
    assert spent(alone, config) + spent(draft, config) > limit or max_running == 2
    assert draft.streamed_layers == ()
    assert draft.num_blocks == plan.num_blocks


def test_what_does_not_fit_is_told_with_what_would() -> None:
    for device_memory in (10_000, 1_200_000):  # too little for the draft alone, and for both
        with pytest.raises(UserError, match=r"\(besides \d+ of the draft model\).* or another --draft_model") as told:
            plan_with_draft(MODEL, DRAFT, chosen(device_memory=device_memory), SizedGpus(8 << 20))
        config = chosen(device_memory=least_of(told))
        (plan,), draft = plan_with_draft(MODEL, DRAFT, config, SizedGpus(8 << 20))
        assert len(plan.streamed_layers) == 8
        assert spent(plan, config) + spent(draft, config) <= least_of(told)
    with pytest.raises(UserError, match="besides"):
        plan_with_draft(MODEL, DRAFT, chosen(), SizedGpus(1_200_000))  # as much as there is


def test_a_given_cache_is_the_models_and_the_draft_has_as_many_tokens() -> None:
    config = chosen(kv_cache="200kB")
    (plan,), draft = plan_with_draft(MODEL, DRAFT, config, SizedGpus(8 << 20))
    (alone,) = plan_devices(MODEL, config, SizedGpus(8 << 20))
    assert plan.num_blocks == alone.num_blocks == draft.num_blocks


def test_stages_leave_room_on_the_gpu_of_the_draft() -> None:
    """Three stages on two GPUs: the first and the third share one with the draft, which is in a process of its own."""
    total = 3 << 20
    gpus = SizedGpus(total, total)
    config = chosen(num_csx=3, max_running=6)
    plans, draft = plan_with_draft(MODEL, DRAFT, config, gpus)
    first, second, third = plans
    assert first.limit + third.limit + draft.limit <= int(0.92 * (total - 3 * 1000))
    assert second.limit == int(0.92 * (total - 1000))
    assert draft.limit >= spent(draft, config)
    for plan in (first, third):
        assert spent(plan, config) <= plan.limit
    with pytest.raises(UserError, match="besides") as told:
        plan_with_draft(MODEL, DRAFT, chosen(num_csx=3, max_running=6, device_memory=1_000_000), gpus)
    plan_with_draft(MODEL, DRAFT, chosen(num_csx=3, max_running=6, device_memory=least_of(told)), gpus)


@pytest.mark.parametrize("device_memory", [None, 2_000_000])
def test_a_draft_on_the_same_gpu_guesses_within_the_limit(
    device_memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the front door, with the answers of the model alone."""
    gpus = LateGpus()
    monkeypatch.setattr(gpu_opening, "Gpus", lambda: gpus)
    monkeypatch.setattr(opening, "open_model", lambda _: DRAFT)
    config = chosen(device_memory=device_memory)
    runner, speculator = opening.open_with_speculator(MODEL, config)
    assert isinstance(runner, GpuRunner)
    assert isinstance(speculator, DraftModel)
    if device_memory is not None:
        assert runner.num_streamed_bytes > 0
        assert [device.allowed_bytes for device in gpus.opened] == [device_memory] * 2
    engine = LocalEngine(runner, MODEL.config, config, max_context=256, speculator=speculator)
    try:
        tokens = Client(engine).ask(PROMPT, max_tokens=12).tokens
    finally:
        engine.close()
    assert tokens == list(generate(MODULE, PROMPT, max_tokens=12))
    assert gpus.opened[1].now().count > 0  # the draft was asked
