"""A pipeline answers as one process does, bit for bit, whatever happens beside a request."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from openwafer.serve.core import QueueFullError
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.loading import load_program
from openwafer.serve.native import NativeRunner
from openwafer.serve.pipeline.runner import PipelineRunner
from openwafer.serve.program import Embed
from openwafer.serve.reference import ReferenceRunner
from openwafer.serve.region import split
from openwafer.serve.runner import Batch
from openwafer.serve.speculation import DraftModel, Lookup
from tests.serve.conftest import CONFIGS, Answer, OpenTiny, stored, tiny_module
from tests.serve.pipeline.conftest import OpenPipeline

RNG = np.random.default_rng(1)
PROMPT = RNG.integers(0, 101, 37).tolist()
DRAWN = {"temperature": 1.0, "seed": 7, "num_logprobs": 2, "max_tokens": 24}
DEEP = dataclasses.replace(CONFIGS["llama"], num_hidden_layers=5)


def bits(answer: Answer) -> tuple[list[int], bytes, bytes]:
    values = [[entry.logprob, *(p for _, p in entry.top)] for entry in answer.logprobs]
    prompt = [entry.logprob for entry in answer.prompt_logprobs if entry is not None]
    return answer.tokens, np.array(values).tobytes(), np.array(prompt).tobytes()


def batch(tokens: list[int]) -> Batch:
    count = len(tokens)
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.arange(count, dtype=np.int32),
        sequences=np.zeros(count, np.int32),
        tables=np.arange(4, dtype=np.int32)[None],
        logit_rows=np.arange(0, count, 3, dtype=np.int32),
    )


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt"])
@pytest.mark.parametrize("reference", [False, True])
def test_regions_one_after_the_other_are_the_whole(name: str, quantization: str | None, reference: bool) -> None:
    model, options = stored(tiny_module(CONFIGS[name])), EngineConfig(quantization=quantization)  # pyright: ignore
    regions = split([1.0] * model.config.num_hidden_layers, 1.0, 2)
    programs = [load_program(model, options), *(load_program(model, options, region) for region in regions)]
    assert [program.num_layers for program in programs[1:]] == [len(region.layers) for region in regions]
    assert not programs[1].head
    assert not isinstance(programs[2].body[0], Embed)

    def opened(program):
        if reference:
            return ReferenceRunner(program, num_blocks=4, block_size=16)
        return NativeRunner(program, num_blocks=4, max_rows=32, half_cache=False, num_threads=1)

    whole, first, second = (opened(program) for program in programs)
    given = batch(PROMPT[:20])
    expected = whole.run(given)
    found = second.run_stage(given, first.run_stage(given, None))
    assert found.tobytes() == expected.tobytes()
    for runner in (whole, first, second):
        runner.close()


def test_a_region_reads_no_weight_of_another() -> None:
    model = stored(tiny_module(DEEP))
    read: list[str] = []

    def tensors(wanted):
        for name, tensor in model.tensors(wanted):
            read.append(name)
            yield name, tensor

    watched = dataclasses.replace(model, tensors=tensors)
    first, second, third = split([1.0] * 5, 1.0, 3)
    load_program(watched, EngineConfig(), second)
    assert {name.split(".")[2] for name in read} == {str(layer) for layer in second.layers}
    assert len(read) == len(set(read))
    read.clear()
    load_program(watched, EngineConfig(), first)
    load_program(watched, EngineConfig(), third)
    assert "model.embed_tokens.weight" in read
    assert "lm_head.weight" in read


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}])
def test_the_same_bits_in_a_crowd_on_any_number_of_stages(
    open_tiny: OpenTiny, open_pipeline: OpenPipeline, num_stages: int, options: dict
) -> None:
    alone = bits(open_tiny(DEEP, max_step_tokens=64, **options).ask(PROMPT, **DRAWN))
    assert len(set(alone[0])) > 4
    crowd = open_pipeline(DEEP, num_stages, max_step_tokens=23, num_blocks=24, **options)
    assert bits(crowd.ask_in_a_crowd(PROMPT, **DRAWN)) == alone
    assert crowd.engine.num_preemptions > 0
    crowd.ask(PROMPT, max_tokens=1)
    again = crowd.ask(PROMPT, **DRAWN)
    assert bits(again) == alone
    assert again.last.usage is not None
    assert again.last.usage.num_cached_tokens >= 32
    stats = crowd.engine.stats()
    assert stats.kv_cache_usage == 0
    assert len(stats.stage_busy_s) == num_stages
    assert min(stats.stage_busy_s) > 0


def test_tokens_drawn_by_the_last_stage_are_those_of_the_engine(
    open_tiny: OpenTiny, open_pipeline: OpenPipeline
) -> None:
    """Without logprobs a row of logits never leaves the last stage."""
    plain, stages = open_tiny(DEEP), open_pipeline(DEEP, 2)
    for sampling in (
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 1},
        {"temperature": 0.8, "top_k": 5, "seed": 2},
        {"temperature": 1.0, "top_p": 0.7, "seed": 3},
        {"temperature": 1.0, "min_p": 0.1, "seed": 4},
        {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    ):
        expected = plain.ask(PROMPT, max_tokens=20, **sampling).tokens
        assert stages.ask(PROMPT, max_tokens=20, **sampling).tokens == expected


def test_prompt_logprobs_of_pieces_in_flight(open_tiny: OpenTiny, open_pipeline: OpenPipeline) -> None:
    """The pieces of one prompt follow each other through the stages without waiting."""
    asked = {"num_logprobs": 1, "prompt_logprobs": True, "max_tokens": 3}
    expected = bits(open_tiny(DEEP).ask(PROMPT, **asked))
    stages = open_pipeline(DEEP, 3, max_step_tokens=5)
    assert bits(stages.ask(PROMPT, **asked)) == expected
    assert stages.engine.stats().num_prompt_tokens == len(PROMPT)


def test_speculation_on_stages(open_tiny: OpenTiny, open_pipeline: OpenPipeline) -> None:
    text = PROMPT[:9] * 4
    plain = open_tiny(DEEP)
    greedy, drawn = bits(plain.ask(text, num_logprobs=1, max_tokens=30)), bits(plain.ask(text, **DRAWN))
    draft = NativeRunner(
        load_program(stored(tiny_module(DEEP)), EngineConfig()), num_blocks=64, max_rows=32, half_cache=False
    )
    for speculator in (Lookup(in_text=True), DraftModel(draft, max_rows=32, max_context=256)):
        stages = open_pipeline(DEEP, 2, speculator=speculator)
        others = [stages.start(stages.request(PROMPT[:n] * 3, max_tokens=20)) for n in (5, 6, 7)]
        assert bits(stages.ask(text, num_logprobs=1, max_tokens=30)) == greedy
        assert bits(stages.ask(text, prediction=greedy[0], **DRAWN)) == drawn
        assert all(len(stages.wait(events).tokens) == 20 for events in others)


def test_several_groups_are_under_way_at_once(open_pipeline: OpenPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most, sizes = 0, 0, []
    launch, land = PipelineRunner.launch, PipelineRunner.land

    def counted_launch(self, batch, draws):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        sizes.append(len(batch.tables))
        launch(self, batch, draws)

    def counted_land(self):
        nonlocal under_way
        under_way -= 1
        return land(self)

    monkeypatch.setattr(PipelineRunner, "launch", counted_launch)
    monkeypatch.setattr(PipelineRunner, "land", counted_land)
    stages = open_pipeline(DEEP, 2)
    started = [stages.start(stages.request(PROMPT[: 3 + n], max_tokens=40)) for n in range(8)]
    assert all(len(stages.wait(events).tokens) == 40 for events in started)
    assert (most, under_way) == (2, 0)
    assert max(set(sizes), key=sizes.count) == 4  # half of the users in each


def test_cancelling_what_is_in_flight_frees_everything_at_once(open_pipeline: OpenPipeline) -> None:
    stages = open_pipeline(DEEP, 3, num_blocks=20, max_running=4)
    requests = [stages.request(PROMPT, max_tokens=200, temperature=1.0) for _ in range(6)]
    events = [stages.start(request) for request in requests]
    events[0].get(timeout=120)
    for request in requests:
        stages.engine.cancel(request.id)
    assert [stages.wait(each).last.finish_reason for each in events] == ["cancelled"] * 6
    stats = stages.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert len(stages.ask(PROMPT).tokens) == 8


def test_nothing_is_left_after_a_wild_crowd(open_tiny: OpenTiny, open_pipeline: OpenPipeline) -> None:
    """Cancelled at random in a cache that is far too small: whoever is not has the answer that one process gives."""
    rng = np.random.default_rng(3)
    stages = open_pipeline(DEEP, 3, num_blocks=17, max_running=9, max_step_tokens=19, speculator=Lookup(in_text=True))
    under_way = []
    for number in range(100):
        prompt = PROMPT[: rng.integers(1, 37)] * int(rng.integers(1, 4))
        request = stages.request(
            prompt,
            client=f"client {number % 3}",
            max_tokens=int(rng.integers(1, 50)),
            temperature=float(rng.choice([0.0, 1.0])),
            seed=number,
            num_logprobs=1 if number % 5 == 0 else None,
        )
        under_way.append((request, stages.start(request)))
        if number % 3 == 0:
            stages.engine.cancel(under_way[int(rng.integers(len(under_way)))][0].id)
        time.sleep(float(rng.choice([0.0, 0.001])))
    answers = [(request, stages.wait(events)) for request, events in under_way]
    assert {answer.last.finish_reason for _, answer in answers} == {"length", "cancelled"}
    assert stages.engine.num_preemptions > 0
    stats = stages.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    plain = open_tiny(DEEP, num_blocks=17)
    for request, answer in answers[::9]:
        if answer.last.finish_reason == "length":
            again = dataclasses.replace(request, id=f"{request.id} again")
            assert plain.wait(plain.start(again)).tokens == answer.tokens


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_lost_stage_ends_the_engine_with_its_name(
    open_pipeline: OpenPipeline, is_idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stages = open_pipeline(DEEP, 2)
    events = None if is_idle else stages.start(stages.request(PROMPT, max_tokens=200))
    if events is not None:
        events.get(timeout=120)
    runner = stages.engine._runner
    assert isinstance(runner, PipelineRunner)
    runner.stages.cut(1)  # pyright: ignore[reportAttributeAccessIssue]
    if events is not None:
        answer = stages.wait(events)
        assert (answer.last.finish_reason, answer.last.error) == ("error", "a stage is gone")
    deadline = time.monotonic() + 60
    while stages.engine.stats().failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stages.engine.stats().failure == "a stage is gone"
    with pytest.raises(QueueFullError, match="a stage is gone"):
        stages.start(stages.request(PROMPT))
    assert "the engine has stopped: a stage is gone" in caplog.text


def test_a_stage_that_hangs_does_not_hold_the_end(
    open_pipeline: OpenPipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("openwafer.serve.engine._PATIENCE_S", 0.2)
    hangs, goes_on = threading.Event(), threading.Event()
    run = NativeRunner.run_stage

    def hanging(self, given, x):
        if x is not None and len(given.tokens) == 1:
            hangs.set()
            goes_on.wait(30)
        return run(self, given, x)

    monkeypatch.setattr(NativeRunner, "run_stage", hanging)
    stages = open_pipeline(DEEP, 2)
    events = stages.start(stages.request(PROMPT, max_tokens=200))
    assert hangs.wait(30)
    threading.Timer(0.5, goes_on.set).start()  # the thread that stands for a process cannot be killed
    stages.engine.close()
    assert stages.wait(events).last.finish_reason in ("error", "cancelled")
