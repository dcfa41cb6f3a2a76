"""Fetch a model or a corpus into the cache: `openwafer pull smollm2`, `openwafer pull org/name`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from openwafer.config import unknown
from openwafer.errors import UserError


def _shakespeare() -> Path:
    from openwafer.data.corpus import pull_shakespeare

    return pull_shakespeare()


CORPORA = {"shakespeare": _shakespeare}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="smollm2, shakespeare, or org/name from a model hub")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    from openwafer.models.pull import MODELS, is_hub_name, pull, pulled_path

    name = args.name
    if name in CORPORA:
        kind, path = "corpus", _with_status(name, CORPORA[name])
    elif name in MODELS or is_hub_name(name):
        kind, path = "model", pulled_path(name)
        if path.is_dir():
            print(f"{name} is already there", file=sys.stderr)
        else:
            _with_status(name, lambda: pull(name))
            if name in MODELS:
                print(f"{name} is under {MODELS[name].licence}, see {path / 'LICENSE'}", file=sys.stderr)
    else:
        raise UserError(
            f"{unknown(f'name {name!r}', name, [*MODELS, *CORPORA])} "
            "(a name such as org/name is pulled from a model hub, with huggingface_hub)"
        )
    print(json.dumps({"name": name, "kind": kind, "path": str(path)}) if args.json else path)


def _with_status(name: str, fetch: Callable[[], Path]) -> Path:
    from rich.console import Console

    with Console(stderr=True).status(f"pulling {name}"):
        return fetch()
