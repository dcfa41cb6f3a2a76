"""Prepare text as token shards: `openwafer data prepare --input FILE_OR_FOLDER... --out DIR`."""

import argparse
import json
import sys
from pathlib import Path

from openwafer.config import add_flags, flag_values
from openwafer.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from openwafer.data.prepare import PrepareConfig

    commands = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    summary = "tokenize text into a folder of shards"
    description = f"{summary[0].upper()}{summary[1:]}, which `openwafer train` reads (data.path in its params)."
    prepare = commands.add_parser("prepare", help=summary, description=description, allow_abbrev=False)
    source = prepare.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input", nargs="+", metavar="PATH", help=".txt, .jsonl or .jsonl.gz files, folders of them, glob patterns"
    )
    source.add_argument("--corpus", choices=["shakespeare"], help="a corpus that is fetched by itself")
    prepare.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    names = ("vocab_size", "tokenizer", "end_of_text", "text_key", "val_fraction")
    add_flags(prepare, PrepareConfig, names)
    prepare.add_argument("--overwrite", action="store_true", help="replace an earlier folder of shards")
    prepare.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    from openwafer.data.corpus import pull_shakespeare
    from openwafer.data.prepare import PrepareConfig, prepare

    config = PrepareConfig(**flag_values(PrepareConfig, args))
    if not str(args.out).strip():
        raise UserError("--out must name a folder")
    inputs = [pull_shakespeare()] if args.corpus else args.input
    done = prepare(inputs, args.out, config, overwrite=args.overwrite)
    if args.json:
        print(json.dumps({**vars(done), "folder": str(done.folder)}))
        return
    print(
        f"{done.num_documents} document{'s' * (done.num_documents != 1)}, "
        f"{done.train_tokens} train and {done.val_tokens} val tokens, "
        f"vocabulary {done.vocab_size}, in {done.folder}",
        file=sys.stdout,
    )
