"""Make a model trainable: `openwafer import MODEL MODEL_DIR` writes it as step 0 of a run in MODEL_DIR."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder, GGUF file, or name of a pulled model")
    parser.add_argument("model_dir", metavar="MODEL_DIR", type=Path, help="folder of the run to come")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    from openwafer.cli.tensor_progress import tensor_progress
    from openwafer.models.load import open_model
    from openwafer.train.importer import import_model

    with tensor_progress("importing") as on_tensor:
        done = import_model(open_model(args.model), args.model_dir, on_tensor=on_tensor)
    if args.json:
        print(json.dumps({**vars(done), "checkpoint": str(done.checkpoint)}))
    else:
        tokenizer = "with its tokenizer" if done.has_tokenizer else "without a tokenizer"
        print(f"{done.num_parameters:,} parameters {tokenizer}, in {done.checkpoint}")
