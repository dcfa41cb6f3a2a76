"""Write a trained model as a Hugging Face folder: `openwafer export MODEL OUT_FOLDER`."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openwafer.config import add_flags, flag_values, option


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """How weights are written."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = option(None, help="type of the weights (default: as stored)")
    shard_size: int = option(512 << 20, help="largest file of weights, such as 2GiB", size=True, minimum=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="model_dir of a run, checkpoint, or any model that can be loaded"
    )
    parser.add_argument("out", metavar="OUT_FOLDER", type=Path, help="folder to write, which must not exist")
    add_flags(parser, ExportConfig, ("dtype", "shard_size"))
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    config = ExportConfig(**flag_values(ExportConfig, args))

    import torch

    from openwafer.cli.tensor_progress import tensor_progress
    from openwafer.models.huggingface_export import export
    from openwafer.models.load import open_model

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    with tensor_progress("exporting") as on_tensor:
        done = export(
            open_model(args.model),
            args.out,
            dtype=dtypes[config.dtype] if config.dtype else None,
            shard_bytes=config.shard_size,
            on_tensor=on_tensor,
        )
    if args.json:
        print(json.dumps({**vars(done), "folder": str(done.folder)}))
    else:
        print(f"{done.model_type} with {done.num_parameters:,} parameters, {done.num_shards} file(s), in {done.folder}")
