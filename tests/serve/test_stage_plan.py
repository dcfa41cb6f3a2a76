"""What the stages of several hosts hold: each host's memory and cores are its own, blocks are the same on all."""

import dataclasses
import logging

import pytest

from openwafer.errors import UserError
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.host import Host, with_less
from openwafer.serve.inventory import take_inventory
from openwafer.serve.stage_plan import plan_stages
from tests.serve.conftest import CONFIGS, stored, tiny_module

MODEL = stored(tiny_module(dataclasses.replace(CONFIGS["llama"], num_hidden_layers=24)))
CONFIG = EngineConfig(num_csx=3, num_threads=None, max_running=4, max_step_tokens=8)
ONE, TWO = Host(num_stages=1, num_cores=2, name="one"), Host(num_stages=2, num_cores=6, name="two")


def test_hosts_with_room_plan_as_one_host_does_but_for_their_cores() -> None:
    alone = plan_stages(MODEL, dataclasses.replace(CONFIG, num_threads=3))
    hosts = [dataclasses.replace(host, free_dram=1 << 40) for host in (ONE, TWO)]
    plans = plan_stages(MODEL, CONFIG, hosts)
    assert [plan.num_threads for plan in plans] == [2, 3, 3]
    assert [dataclasses.replace(plan, num_threads=1) for plan in plans] == alone


def test_a_budget_is_of_each_host() -> None:
    """What stays in its memory and its keys and values are within it."""
    config = dataclasses.replace(CONFIG, num_csx=4, dram=1_500_000)
    halves = [Host(num_stages=2, num_cores=2), Host(num_stages=2, num_cores=2)]
    inventory = take_inventory(MODEL, config)
    plans = plan_stages(MODEL, config, halves)
    assert len({plan.num_blocks for plan in plans}) == 1
    for stages in (plans[:2], plans[2:]):
        layers = sum(len(plan.region.layers) for plan in stages)
        cache = plans[0].num_blocks * 16 * layers * 2 * 2 * 16 * 4
        total = sum(inventory.total(plan.region) for plan in stages)
        assert total + cache > 1_500_000  # else nothing had to be streamed
        streamed = sum(plan.placement.file_bytes for plan in stages if plan.placement is not None)
        assert total - streamed + cache < 1_500_000
    with pytest.raises(UserError, match=r"dram 878\.9 KiB is too small"):
        plan_stages(MODEL, dataclasses.replace(config, dram=900_000), halves)


def test_the_smallest_host_decides_how_many_blocks_there_are(caplog: pytest.LogCaptureFixture) -> None:
    """It has to stream; the others stay in memory, and have no more keys and values than it."""
    hosts = [dataclasses.replace(ONE, free_dram=1 << 40), dataclasses.replace(TWO, free_dram=2_000_000)]
    with caplog.at_level(logging.WARNING):
        plans = plan_stages(MODEL, CONFIG, hosts)
    assert "free on two: weights are streamed" in caplog.text
    assert plans[0].placement is None
    assert plans[1].placement is not None
    assert plans[2].placement is not None
    (num_blocks,) = {plan.num_blocks for plan in plans}
    assert num_blocks < plan_stages(MODEL, CONFIG)[0].num_blocks
    fewer = plan_stages(MODEL, CONFIG, [dataclasses.replace(ONE, free_dram=1_000_000), hosts[1]])
    assert fewer[0].placement is not None
    assert {plan.num_blocks for plan in fewer} <= {num_blocks, *range(num_blocks)}


def test_a_draft_model_takes_from_the_first_host() -> None:
    hosts = with_less([dataclasses.replace(ONE, free_dram=100), TWO], 30)
    assert [host.free_dram for host in hosts] == [70, None]
    assert with_less([TWO], 30)[0].free_dram is None
