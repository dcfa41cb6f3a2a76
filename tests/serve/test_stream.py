"""Weights on flash: the same bits as in memory, and no more memory than was given."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from openwafer.errors import UserError
from openwafer.models.config import ModelConfig
from openwafer.models.huggingface_export import export
from openwafer.models.load import open_model
from openwafer.serve import stage_plan
from openwafer.serve.budget import place, share
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.inventory import Inventory, Size, take_inventory
from openwafer.serve.loading import load_program
from openwafer.serve.native import NativeRunner
from openwafer.serve.opening import open_runner, open_stage
from openwafer.serve.region import Region
from openwafer.serve.runner import Batch
from openwafer.serve.stage_plan import plan_stages, settled
from openwafer.serve.stream import Placement, WeightStream
from tests.serve.conftest import CONFIGS, stored, tiny_module

ROOT = Path(__file__).parents[2]


def batch(tokens: list[int], start: int = 0, logits: bool = True) -> Batch:
    count = len(tokens)
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.arange(start, start + count, dtype=np.int32),
        sequences=np.zeros(count, np.int32),
        tables=np.arange(4, dtype=np.int32)[None],
        logit_rows=np.arange(count if logits else 0, dtype=np.int32),
    )


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama3", "gemma3", "gpt", "odd"])
def test_streamed_weights_give_the_same_bits(tmp_path: Path, name: str, quantization: str | None) -> None:
    config = dataclasses.replace(CONFIGS[name], num_hidden_layers=3)
    model, options = stored(tiny_module(config)), EngineConfig(quantization=quantization)  # pyright: ignore
    inventory = take_inventory(model, options)
    steps = [batch(list(range(3, 40, 2))), batch([7], 19, logits=False), batch([90, 7], 20)]

    def answers(stream: WeightStream | None) -> list[bytes]:
        program = load_program(model, options, None, stream)
        runner = NativeRunner(program, num_blocks=4, max_rows=32, half_cache=True, num_threads=2, stream=stream)
        found = [runner.run(step).tobytes() for step in steps]
        runner.close()
        return found

    expected = answers(None)
    unit = max(*(size.matrices for size in inventory.layers), inventory.group_bytes) + 4096
    for layers, head, table in (([0, 1, 2], True, True), ([1], False, False), ([], True, True), ([0, 2], True, False)):
        placement = Placement(
            layers=frozenset(layers), head=head, table=table, unit_bytes=unit, pool_bytes=2 * unit, file_bytes=0
        )
        stream = WeightStream(placement, tmp_path / "flash")
        assert answers(stream) == expected
        assert stream.num_bytes_read > 0
        assert [path.name for path in (tmp_path / "flash").iterdir()] == [".lock"]


def test_a_head_of_many_pieces(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIGS["llama"], vocab_size=997)
    model, options = stored(tiny_module(config)), EngineConfig(quantization="int8")
    unit = max(size.matrices for size in take_inventory(model, options).layers)
    placement = Placement(
        layers=frozenset([0, 1]), head=True, table=True, unit_bytes=unit, pool_bytes=3 * unit, file_bytes=0
    )
    small = dataclasses.replace(placement, unit_bytes=20_000)
    stream = WeightStream(placement, tmp_path)
    stream.placement = small  # the layers still fit the pool; the tables are cut finer
    program = load_program(model, options, None, stream)
    assert len(program.head) == 1 + 4
    streamed = NativeRunner(program, num_blocks=4, max_rows=32, half_cache=True, num_threads=2, stream=stream)
    resident = NativeRunner(load_program(model, options), num_blocks=4, max_rows=32, half_cache=True, num_threads=2)
    step = batch([5, 996, 5, 15, 16, 700])
    assert streamed.run(step).tobytes() == resident.run(step).tobytes()
    streamed.close()
    resident.close()


def inventory_of(num_layers: int, *, layer: int = 1000, table: int = 5000, is_tied: bool = False) -> Inventory:
    return Inventory(
        layers=(Size(layer << 10, 64),) * num_layers,
        embedding=Size(table << 10, 0),
        head=Size(table << 10, 64),
        group_bytes=1024,
        is_tied=is_tied,
        is_packed=True,
    )


def test_what_fits_stays_and_the_rest_is_spread() -> None:
    inventory, whole = inventory_of(10), Region(first=0, stop=10, num_layers=10)
    assert place(30_000 << 10, inventory, whole, 8) is None
    only_table = place(16_100 << 10, inventory, whole, 8)
    assert only_table is not None
    assert (only_table.layers, only_table.head, only_table.table) == (frozenset(), False, True)
    half = place(12_600 << 10, inventory, whole, 8)
    assert half is not None
    assert (sorted(half.layers), half.head, half.table) == ([1, 3, 5, 7, 9], False, True)
    least = place(2_600 << 10, inventory, whole, 8)  # of which `share` gives more, for loading
    assert least is not None
    assert (len(least.layers), least.head, least.table) == (10, True, True)
    tied = place(12_600 << 10, inventory_of(10, is_tied=True), whole, 8)
    assert tied is not None
    assert (tied.head, tied.table) == (False, False)


def test_a_budget_that_cannot_be_is_refused_with_the_number_that_can() -> None:
    inventory, regions = inventory_of(10), [Region(first=0, stop=10, num_layers=10)]
    with pytest.raises(UserError, match=r"dram 976\.6 KiB is too small: .* are needed") as told:
        share(1_000_000, inventory, regions, lambda _: 5000, 8)
    needed = int(str(told.value).split("--dram ")[1].split(",")[0])
    (budget,) = share(needed, inventory, regions, lambda _: 5000, 8)
    assert place(budget, inventory, regions[0], 8) is not None
    with pytest.raises(UserError, match="too small"):
        share(needed - 1, inventory, regions, lambda _: 5000, 8)


def test_a_model_larger_than_memory_is_streamed_without_being_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = stored(tiny_module(dataclasses.replace(CONFIGS["llama"], num_hidden_layers=12)))
    config = EngineConfig(kv_cache=100_000, max_step_tokens=8)
    assert settled(model, config) is config
    monkeypatch.setattr(stage_plan, "available_bytes", lambda: 1_200_000)
    chosen = settled(model, config)
    assert chosen.dram == 960_000
    assert "weights are streamed" in caplog.text
    (plan,) = plan_stages(model, chosen)
    assert plan.placement is not None
    assert plan.placement.layers


def test_a_folder_without_room_is_told(tmp_path: Path) -> None:
    placement = Placement(
        layers=frozenset(), head=False, table=True, unit_bytes=4096, pool_bytes=4096, file_bytes=1 << 60
    )
    with pytest.raises(UserError, match=r"bytes free, 1,152,921,504,606,846,976 are needed"):
        WeightStream(placement, tmp_path)


def test_without_a_folder_each_server_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENWAFER_CACHE", str(tmp_path))
    placement = Placement(layers=frozenset(), head=False, table=True, unit_bytes=4096, pool_bytes=4096, file_bytes=0)
    streams = [WeightStream(placement) for _ in range(2)]
    assert {path.name for path in (tmp_path / "flash").iterdir()} == {"serve-0", "serve-1"}
    for stream in streams:
        stream.close()


def test_streaming_needs_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("OPENWAFER_CACHE", str(tmp_path))
    model = stored(tiny_module(dataclasses.replace(CONFIGS["llama"], num_hidden_layers=6)))
    config = EngineConfig(dram="800KiB", kv_cache="50KiB", max_step_tokens=8)  # pyright: ignore[reportArgumentType]
    (plan,) = plan_stages(model, config)
    with pytest.raises(UserError, match="cannot be streamed: raise --dram"):
        open_stage(model, config, plan)


LARGE = ModelConfig(
    family="llama",
    hidden_size=512,
    num_hidden_layers=12,
    num_heads=8,
    num_kv_heads=2,
    intermediate_size=1024,
    vocab_size=2000,
    max_position_embeddings=256,
)
MEASURE = """
import json, sys
import numpy as np
from openwafer.models.load import open_model
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.inventory import blueprint
from openwafer.serve.native import load_library
from openwafer.serve.opening import open_runner
from openwafer.serve.runner import Batch

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10

stored = open_model(sys.argv[1])
blueprint(stored.config), load_library()
open("/proc/self/clear_refs", "w").write("5")
before = peak()
runner = open_runner(stored, EngineConfig(**json.loads(sys.argv[2])))
loaded = peak()
rows = np.arange(16, dtype=np.int32)
for start in range(0, 64, 16):
    logits = runner.run(Batch(tokens=rows, positions=rows + start, sequences=rows * 0,
                              tables=np.arange(4, dtype=np.int32)[None], logit_rows=rows[-1:]))
print(json.dumps({"loaded": loaded - before, "ran": peak() - before, "logits": logits.tobytes().hex()}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """The peak of a process that loads and runs a model much larger than the budget, as the system counts it."""
    export(stored(tiny_module(LARGE)), tmp_path / "model", dtype=torch.float32)
    size = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))

    dram = 40 << 20
    assert size > 2.5 * dram
    options = {"kv_cache": 4 << 20, "max_step_tokens": 16, "num_threads": 1}
    streamed = {**options, "dram": dram, "flash": str(tmp_path / "flash")}
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), json.dumps(streamed)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
    slack = 8 << 20  # activations, rotary tables, threads
    assert dram / 2 < found["ran"] < dram + slack, (found["loaded"] / 2**20, found["ran"] / 2**20)
    runner = open_runner(open_model(tmp_path / "model"), EngineConfig(**options))
    rows = np.arange(16, dtype=np.int32)
    for start in range(0, 64, 16):
        step = batch(rows.tolist(), start)
        expected = runner.run(dataclasses.replace(step, logit_rows=rows[-1:]))
    runner.close()
    assert found["logits"] == expected.tobytes().hex()
