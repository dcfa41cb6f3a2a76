"""The engine's side of a pipeline: batches go in at the first stage, tokens come out of the last."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.lowering import PAGE
from openwafer.serve.pipeline.message import Work, decoded_result
from openwafer.serve.pipeline.pipe import Broken, Receiver, Sender
from openwafer.serve.pipeline.processes import StageLost, StageProcesses
from openwafer.serve.pipeline.spec import StageSpec
from openwafer.serve.runner import Batch, Draw, Drawn
from openwafer.serve.stage_plan import StagePlan

if TYPE_CHECKING:
    from openwafer.serve.gpu.device_plan import DevicePlan
    from openwafer.serve.pipeline.cluster import Cluster


class Stages(Protocol):
    """Stages in a row, started."""

    @property
    def first(self) -> Sender:
        """Takes batches."""
        ...

    @property
    def last(self) -> Receiver:
        """Gives results."""
        ...

    def check(self) -> None:
        """Raise if one has ended."""
        ...

    def lost(self) -> StageLost:
        """What to say when a connection is broken."""
        ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


def open_pipeline(
    model: Path,
    config: EngineConfig,
    plans: "Sequence[StagePlan] | Sequence[DevicePlan]",
    cluster: "Cluster | None" = None,
) -> "PipelineRunner":
    """A process for each plan, here or (with `cluster`) one on each rank, once all have loaded their layers."""
    config = dataclasses.replace(config, num_csx=len(plans))
    specs = [
        StageSpec(model=model.resolve(), config=config, index=index, plan=plan) for index, plan in enumerate(plans)
    ]
    if cluster is None:
        stages: Stages = StageProcesses(specs)
    else:
        from openwafer.serve.pipeline.stage_ranks import StageRanks

        stages = StageRanks(cluster, specs)
    return PipelineRunner(stages, num_stages=len(plans), num_blocks=plans[0].num_blocks)


class PipelineRunner:
    """Speaks with the first and the last stage."""

    block_size = PAGE

    def __init__(self, stages: Stages, *, num_stages: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # One more did not help: groups get smaller, and 8 users on two cores lost 17 % of their speed.
        self.max_in_flight = num_stages
        self.stages = stages
        self._busy_s = (0.0,) * num_stages

    def launch(self, batch: Batch, draws: Sequence[Draw | None]) -> None:
        try:
            self.stages.first.send(Work(batch=batch, draws=draws, x=None).encoded())
        except Broken:
            raise self.stages.lost() from None

    def land(self) -> Drawn:
        try:
            drawn, self._busy_s = decoded_result(self.stages.last.receive())
        except Broken:
            raise self.stages.lost() from None
        return drawn

    def run(self, batch: Batch) -> np.ndarray:
        """One batch alone; nothing else may be under way."""
        self.launch(batch, [None] * len(batch.logit_rows))
        return self.land().logits

    def check(self) -> None:
        self.stages.check()

    def busy_s(self) -> tuple[float, ...]:
        return self._busy_s

    def abandon(self) -> None:
        """End the stages whatever they are doing; whoever waits for them is told."""
        self.stages.kill()

    def close(self) -> None:
        self.stages.close()
