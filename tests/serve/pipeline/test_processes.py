"""Stages as processes: what is said when one cannot load. How they serve and die is in tests/cli/test_cli_serve.py."""

import dataclasses
from pathlib import Path

import pytest

from openwafer.errors import UserError
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.device_plan import DevicePlan
from openwafer.serve.pipeline.processes import StageProcesses
from openwafer.serve.pipeline.spec import StageSpec
from openwafer.serve.region import Region
from openwafer.serve.stage_plan import StagePlan
from openwafer.serve.stream import Placement

PLAN = StagePlan(
    region=Region(first=0, stop=2, num_layers=2), num_blocks=4, half_cache=False, num_threads=1, placement=None
)


def test_a_stage_that_cannot_load_says_why(tmp_path: Path) -> None:
    spec = StageSpec(model=tmp_path / "gone", config=EngineConfig(), index=0, plan=PLAN)
    with pytest.raises(UserError, match=r"stage 1 of 1: no file or folder .*gone"):
        StageProcesses([spec])


def test_modules_in_the_folder_where_the_user_stands_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataclasses.py").write_text("raise RuntimeError('not the one of Python')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it may be `.`
    test_a_stage_that_cannot_load_says_why(tmp_path)


def test_the_plan_of_a_gpu_arrives_as_it_was_sent() -> None:
    plan = DevicePlan(
        region=Region(first=2, stop=5, num_layers=9),
        gpu=1,
        limit=1 << 40,
        num_blocks=77,
        streamed_layers=(2, 4),
        flash_layers=(4,),
        layer_bytes=10,
        resident_bytes=10,
        streamed_bytes=20,
        num_threads=3,
    )
    config = EngineConfig(device="cuda", device_memory=5)
    spec = StageSpec(model=Path("model"), config=config, index=0, plan=plan)
    assert StageSpec.decoded(spec.encoded()) == spec


def test_a_spec_arrives_as_it_was_sent() -> None:
    config = EngineConfig(num_csx=3, dram=1 << 30, flash=Path("somewhere"), quantization="int4", prefix_cache=False)
    placement = Placement(layers=frozenset([1, 0]), head=True, table=False, unit_bytes=5, pool_bytes=10, file_bytes=11)
    plan = dataclasses.replace(PLAN, placement=placement)
    spec = StageSpec(model=Path("model"), config=config, index=2, plan=plan)
    assert StageSpec.decoded(spec.encoded()) == spec
    assert spec.is_last
