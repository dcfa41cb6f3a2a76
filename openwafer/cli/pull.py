"""Fetch a model or a corpus into the cache: `openwafer pull smollm2`, `openwafer pull org/name`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from openwafer.config import unknown
from openwafer.errors import UserError
from openwafer.registry import cache_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(_sources())}, or org/name from a hub")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    from rich.console import Console

    kind, fetch = _source(args.name)
    before = _modified(cache_dir())
    with Console(stderr=True).status(f"pulling {args.name}"):
        path = fetch()
    fresh = _modified(cache_dir()) != before
    if args.json:
        print(json.dumps({"name": args.name, "kind": kind, "path": str(path), "pulled": fresh}))
    else:
        print(path)
