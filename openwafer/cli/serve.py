"""Serve a model: an OpenAI-compatible API, a chat page, a playground and a console at one address."""

import argparse
import dataclasses
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openwafer import __version__
from openwafer.config import add_flags, flag_values
from openwafer.errors import UserError
from openwafer.serve.api.config import ServeConfig
from openwafer.serve.engine_config import EngineConfig
from openwafer.swarmx.torchrun import is_distributed, world_size

if TYPE_CHECKING:
    from openwafer.serve.api.served_model import ServedModel
    from openwafer.serve.pipeline.cluster import Cluster

_NEEDED = ("fastapi", "uvicorn", "uvloop", "httptools", "llguidance", "prometheus_client")
# What other servers call the same thing. torchrun takes --log for a short form of its own flags, and refuses it.
_ALIASES = {"max_model_len": "max_context", "max_num_seqs": "max_running", "log_format": "log"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="pulled name, model_dir of train, Hugging Face folder, or GGUF file"
    )
    add_flags(parser, ServeConfig, [field.name for field in dataclasses.fields(ServeConfig)])
    add_flags(parser, EngineConfig, [field.name for field in dataclasses.fields(EngineConfig)])
    for alias, name in _ALIASES.items():
        parser.add_argument(f"--{alias}", dest=name, metavar="X", help=f"same as --{name}", default=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    config = ServeConfig(**flag_values(ServeConfig, args))
    engine_config = EngineConfig(**_with_ranks(flag_values(EngineConfig, args)))
    if config.api_key is None and os.environ.get("OPENWAFER_API_KEY"):
        config = dataclasses.replace(config, api_key=os.environ["OPENWAFER_API_KEY"])
    if not is_distributed() or engine_config.num_csx == 1:
        return _serve(args.model, config, engine_config)

    from openwafer.serve.pipeline.cluster import Cluster
    from openwafer.serve.pipeline.members import meet
    from openwafer.serve.pipeline.rank import serve_stage

    members = meet(args.model, engine_config, __version__)
    if members.rank > 0:
        serve_stage(members, args.model, engine_config)
    with Cluster(members) as cluster:
        _serve(args.model, config, engine_config, cluster)


def _with_ranks(given: dict[str, Any]) -> dict[str, Any]:
    """Under torchrun every rank is a stage."""
    if not is_distributed():
        return given
    size = world_size()
    if given.get("num_csx", size) != size:
        raise UserError(
            f"num_csx is {given['num_csx']}, and torchrun has started {size} ranks, each of which is a stage: leave "
            f"out --num_csx, or start {given['num_csx']} ranks"
        )
    return given | {"num_csx": size}


def _serve(model: str, config: ServeConfig, engine_config: EngineConfig, cluster: "Cluster | None" = None) -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {', '.join(missing)}: {sys.executable} -m pip install 'openwafer[serve]'")

    from openwafer.serve.api.logs import configure
    from openwafer.serve.api.server import ApiServer
    from openwafer.serve.api.service import Service
    from openwafer.serve.keys import KeyStore, default_path

    configure(config.log)
    template = _read_template(config.chat_template)
    names = _names(config.served_model_name, model)
    store = KeyStore(config.keys or default_path())
    service = Service(config, store, names)
    server = ApiServer(service, lambda: _load(model, names, engine_config, config, template, cluster))
    _announce(server.url, names, service.needs_key, service.is_public)
    try:
        server.run()
    finally:
        store.close()


def _load(
    model: str,
    names: tuple[str, ...],
    engine_config: EngineConfig,
    config: ServeConfig,
    template: str | None,
    cluster: "Cluster | None",
) -> "ServedModel":
    from openwafer.serve.decoder_library import build_ahead

    if engine_config.device == "cpu":
        build_ahead()

    from openwafer.serve.api.served_model import ServedModel
    from openwafer.serve.engine import open_engine

    engine, tokenizer, model_config = open_engine(model, engine_config, cluster)
    if tokenizer is None:
        engine.close()
        raise UserError(f"{model} has no tokenizer, so it cannot be served: put its tokenizer.json beside it")
    return ServedModel.make(
        names,
        engine,
        tokenizer,
        chat_template=template,
        tool_call_parser=config.tool_call_parser,
        description=f"{__version__} {model_config} {engine_config}",
    )


def _names(given: str | None, model: str) -> tuple[str, ...]:
    """What clients ask for: by default the model's own name, without the way to it."""
    if given is not None:
        names = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
        if not names:
            raise UserError("--served_model_name must be a name, or several separated by commas")
        return names
    path = Path(model)
    if path.exists():
        return (path.resolve().name.removesuffix(".gguf"),)
    return (model,)


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --chat_template {path}: {error}") from None


def _announce(url: str, names: tuple[str, ...], needs_key: bool, is_public: bool) -> None:
    who = "clients need an API key" if needs_key else "no API keys, so only this machine can reach it"
    if is_public:
        who += ", and other machines can reach it"
    print(f"loading {', '.join(names)}, to be served at {url} ({who})", file=sys.stderr)
    print(f"API {url}/v1   chat {url}/   playground {url}/playground   console {url}/console", file=sys.stderr)
