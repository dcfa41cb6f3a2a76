"""What a stage is told when it starts."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openwafer.config import parse
from openwafer.serve.engine_config import EngineConfig

if TYPE_CHECKING:
    from openwafer.serve.gpu.device_plan import DevicePlan


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Stage `index` of the model at `model`. On a CPU what it holds follows from `config`.

    On a GPU it does not: how much memory is free may be another number by the time that a stage looks.
    """

    model: Path
    config: EngineConfig
    index: int
    device_plan: "DevicePlan | None" = None

    @property
    def is_last(self) -> bool:
        return self.index == self.config.num_csx - 1

    def encoded(self) -> bytes:
        values = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self.config).items()}
        fields = {"model": str(self.model), "config": values, "index": self.index}
        if self.device_plan is not None:
            fields["device_plan"] = dataclasses.asdict(self.device_plan)
        return json.dumps(fields).encode()

    @classmethod
    def decoded(cls, data: bytes | memoryview) -> "StageSpec":
        fields = json.loads(bytes(data))
        config = parse(EngineConfig, fields["config"])
        plan = None if "device_plan" not in fields else _device_plan(fields["device_plan"])
        return cls(model=Path(fields["model"]), config=config, index=fields["index"], device_plan=plan)


def _device_plan(fields: dict[str, Any]) -> "DevicePlan":
    from openwafer.serve.gpu.device_plan import DevicePlan
    from openwafer.serve.region import Region

    read: dict[str, Any] = {"region": Region(**fields["region"])}
    for name in ("streamed_layers", "flash_layers"):
        read[name] = tuple(fields[name])
    return DevicePlan(**fields | read)
