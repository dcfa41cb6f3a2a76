"""What a stage is told when it starts."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from openwafer.config import parse
from openwafer.serve.engine_config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Stage `index` of the model at `model`; what it holds follows from `config`."""

    model: Path
    config: EngineConfig
    index: int

    @property
    def is_last(self) -> bool:
        return self.index == self.config.num_csx - 1

    def encoded(self) -> bytes:
        values = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self.config).items()}
        return json.dumps({"model": str(self.model), "config": values, "index": self.index}).encode()

    @classmethod
    def decoded(cls, data: bytes | memoryview) -> "StageSpec":
        fields = json.loads(bytes(data))
        config = parse(EngineConfig, fields["config"])
        return cls(model=Path(fields["model"]), config=config, index=fields["index"])
