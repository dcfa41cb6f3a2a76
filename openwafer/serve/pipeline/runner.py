"""The engine's side of a pipeline: batches go in at the first stage, tokens come out of the last."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.lowering import PAGE
from openwafer.serve.pipeline.message import Work, decoded_result
from openwafer.serve.pipeline.pipe import Broken
from openwafer.serve.pipeline.processes import StageProcesses
from openwafer.serve.pipeline.spec import StageSpec
from openwafer.serve.runner import Batch, Draw, Drawn
from openwafer.serve.stage_plan import StagePlan


class PipelineRunner:
    """Starts one process for each plan and speaks with the first and the last of them."""

    block_size = PAGE

    def __init__(self, model: Path, config: EngineConfig, plans: Sequence[StagePlan]) -> None:
        self.num_blocks = plans[0].num_blocks
        self.max_in_flight = len(plans)
        self._busy_s = (0.0,) * len(plans)
        config = dataclasses.replace(config, num_csx=len(plans))
        specs = [StageSpec(model=model.resolve(), config=config, index=index) for index in range(len(plans))]
        self._processes = StageProcesses(model, specs, plans)

    @property
    def process_ids(self) -> list[int]:
        return self._processes.process_ids

    def launch(self, batch: Batch, draws: Sequence[Draw | None]) -> None:
        try:
            self._processes.first.send(Work(batch=batch, draws=draws, x=None).encoded())
        except Broken:
            raise self._processes.lost() from None

    def land(self) -> Drawn:
        try:
            drawn, self._busy_s = decoded_result(self._processes.last.receive())
        except Broken:
            raise self._processes.lost() from None
        return drawn

    def run(self, batch: Batch) -> np.ndarray:
        """One batch alone; nothing else may be under way."""
        self.launch(batch, [None] * len(batch.logit_rows))
        return self.land().logits

    def check(self) -> None:
        self._processes.check()

    def busy_s(self) -> tuple[float, ...]:
        return self._busy_s

    def abandon(self) -> None:
        """End the stages whatever they are doing; whoever waits for them is told."""
        self._processes.kill()

    def close(self) -> None:
        self._processes.close()
