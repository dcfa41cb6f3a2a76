"""A params file: what to build, what to train it on, and how.

Sections `model`, `data`, `train`, `optimizer`, `schedule`, `memoryx` and `swarmx` hold the fields of their
configuration classes. Keys outside a section are put into the one that has them, so the vendor's three-line files
are complete.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openwafer.config import load_yaml, parse, unknown
from openwafer.data.config import DataConfig
from openwafer.errors import UserError
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.models.config import ModelConfig
from openwafer.swarmx.config import SwarmConfig
from openwafer.train.config import TrainConfig
from openwafer.train.schedule import ScheduleConfig

_HERE = Path(__file__).resolve().parent
# The presets: in a checkout beside the package, in an installed package inside it.
_LIBRARIES = (_HERE.parent / "params", _HERE / "params_library")


@dataclass(frozen=True, kw_only=True)
class Params:
    """One params file."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    memoryx: MemoryConfig = field(default_factory=MemoryConfig)
    swarmx: SwarmConfig = field(default_factory=SwarmConfig)

    def as_json(self) -> dict[str, Any]:
        """Plain values, as a params file would have them."""
        return _plain(dataclasses.asdict(self))


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "memoryx": MemoryConfig,
    "swarmx": SwarmConfig,
}


def load_params(source: str | Path, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Params:
    """Read a params file, or a preset by its name; `flags` (section → values) win over the file."""
    path = find_params(source)
    mapping = load_yaml(path)
    if mapping is None:
        raise UserError(f"{path} is empty: it needs at least hidden_size, num_hidden_layers and num_heads")
    return build_params(mapping, flags)


def run_params(source: str | Path | None, flags: Mapping[str, Mapping[str, Any]]) -> Params:
    """The params of a run: as `load_params`, but a model that is not described is the one in the model_dir.

    Without a file everything is taken from the newest checkpoint there, so an imported model can be trained and
    an interrupted run goes on by the name of its folder alone.
    """
    mapping = {} if source is None else load_yaml(find_params(source)) or {}
    sections = _sections(mapping)
    if sections["model"]:
        return build_params(mapping, flags)
    from openwafer.checkpoint import Checkpoint, latest

    train = parse(TrainConfig, {**sections["train"], **flags.get("train", {})}, "train")
    newest = latest(train.model_dir)
    if newest is None:
        where = "give --params" if source is None else f"{source} describes no model"
        raise UserError(f"{where}: {train.model_dir} has no checkpoint to take the model from")
    stored = Checkpoint.open(newest).meta.get("params", {})
    base = stored if source is None else {**sections, "model": stored.get("model")}
    flags = {**flags, "train": {**flags.get("train", {}), "model_dir": train.model_dir}}
    return build_params(base, flags)


def build_params(mapping: Any, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Params:
    """Params from the contents of a file."""
    sections = _sections(mapping)
    for name, values in (flags or {}).items():
        sections[name] = {**sections[name], **values}
    return Params(**{name: parse(cls, sections[name], name) for name, cls in SECTIONS.items()})


def find_params(source: str | Path) -> Path:
    """The file itself, or the preset of that name."""
    path = Path(source)
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    presets = {file.stem: file for folder in reversed(_LIBRARIES) for file in sorted(folder.glob("*.yaml"))}
    if str(source) not in presets:
        raise UserError(f"no such file: {source}, and {unknown(f'preset {source!s}', str(source), presets)}")
    return presets[str(source)]


def _sections(mapping: Any) -> dict[str, dict[str, Any]]:
    """The file's keys by section."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"a params file must be a mapping of keys to values, got {type(mapping).__name__}")
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in mapping.items():
        if key in SECTIONS:
            if value is not None and not isinstance(value, Mapping):
                raise UserError(f"section {key!r} must be a mapping of keys to values, got {str(value)[:80]!r}")
            for name, inner in (value or {}).items():
                _put(sections, str(key), name, inner)
        else:
            _put(sections, _section_of(key), key, value)
    return sections


def _put(sections: dict[str, dict[str, Any]], section: str, key: Any, value: Any) -> None:
    if key in sections[section]:
        raise UserError(f"{key!r} is given twice: once in section {section!r} and once outside it")
    sections[section][key] = value


def _section_of(key: Any) -> str:
    """The section that a key outside all sections belongs to: the first that has it, `model` before others."""
    fields = {name: {f.name for f in dataclasses.fields(cls)} for name, cls in SECTIONS.items()}
    owners = [name for name, names in fields.items() if key in names]
    if not owners:
        raise UserError(unknown(f"key {str(key)[:80]!r}", str(key), set(SECTIONS).union(*fields.values())))
    if len(owners) > 1 and owners[0] != "model":
        raise UserError(f"{key!r} could mean {' or '.join(f'{o}.{key}' for o in owners)}: put it in its section")
    return owners[0]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, Path) else value
