"""What a stage is told when it starts."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openwafer.config import parse
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.region import Region
from openwafer.serve.stage_plan import StagePlan
from openwafer.serve.stream import Placement

if TYPE_CHECKING:
    from openwafer.serve.gpu.device_plan import DevicePlan


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Stage `index` of the model at `model`.

    The plan is part of it: how much memory is free may be another number by the time that a stage looks, and on
    another host it is.
    """

    model: Path
    config: EngineConfig
    index: int
    plan: "StagePlan | DevicePlan"

    @property
    def name(self) -> str:
        return f"stage {self.index + 1} of {self.config.num_csx}"

    @property
    def is_last(self) -> bool:
        return self.index == self.config.num_csx - 1

    def encoded(self) -> bytes:
        values = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self.config).items()}
        plan = dataclasses.asdict(self.plan)
        if isinstance(self.plan, StagePlan) and self.plan.placement is not None:
            plan["placement"]["layers"] = sorted(self.plan.placement.layers)
        return json.dumps({"model": str(self.model), "config": values, "index": self.index, "plan": plan}).encode()

    @classmethod
    def decoded(cls, data: bytes | memoryview) -> "StageSpec":
        fields = json.loads(bytes(data))
        config = parse(EngineConfig, fields["config"])
        read = _device_plan if config.device == "cuda" else _stage_plan
        return cls(model=Path(fields["model"]), config=config, index=fields["index"], plan=read(fields["plan"]))


def _stage_plan(fields: dict[str, Any]) -> StagePlan:
    placement = fields["placement"]
    if placement is not None:
        placement = Placement(**placement | {"layers": frozenset(placement["layers"])})
    return StagePlan(**fields | {"region": Region(**fields["region"]), "placement": placement})


def _device_plan(fields: dict[str, Any]) -> "DevicePlan":
    from openwafer.serve.gpu.device_plan import DevicePlan

    read: dict[str, Any] = {"region": Region(**fields["region"])}
    for name in ("streamed_layers", "flash_layers"):
        read[name] = tuple(fields[name])
    return DevicePlan(**fields | read)
