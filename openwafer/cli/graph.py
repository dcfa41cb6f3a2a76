"""Print the Units of a model, the pieces that are streamed: `openwafer graph --params FILE`. No weight is
allocated, so the model may be larger than this machine."""

import argparse
import json

from openwafer.config import convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", required=True, metavar="FILE", help="params file, or a preset such as gpt_tiny")
    parser.add_argument(
        "--micro_batch_size", default="1", metavar="N", help="samples that go through the model at once (default 1)"
    )
    parser.add_argument(
        "--context", metavar="N", help="tokens per sample (default: the model's max_position_embeddings)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    from openwafer.config import yaml_scalar
    from openwafer.params import load_params

    limits = {"minimum": 1}
    samples = convert(yaml_scalar(args.micro_batch_size), int, "--micro_batch_size", limits)
    context = None if args.context is None else convert(yaml_scalar(args.context), int, "--context", limits)
    params = load_params(args.params, {"data": {} if context is None else {"context": context}})
    context = params.data.context or params.model.max_position_embeddings

    import torch

    from openwafer.graph import capture, table
    from openwafer.graph.deferred import deferred
    from openwafer.models.build import build

    with deferred():
        module = build(params.model)
    ids = torch.zeros(samples, context, dtype=torch.int64, device="meta")
    graph = capture(module, (), {"input_ids": ids, "labels": ids.clone()})
    print(json.dumps(table.as_json(graph)) if args.json else table.as_text(graph))
