"""A model served from a GPU in every way that it can be opened: `python bench/serve_gpu.py [--device cpu]`.

A checkpoint with random weights is opened whole, on two stages (which share the GPU if there is one), with less device
memory than it needs, with less host memory too, and with guesses. With `batch_invariant` all of these must give the
same tokens and the same bits of logprobs, to a request alone and among 32 others. Packed weights give other answers,
the same alone and in a crowd. Needs no tokenizer and no network.
"""

import argparse
import dataclasses
import gc
import logging
import queue
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from openwafer.checkpoint import save
from openwafer.errors import UserError
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.serve.core import Engine, Event, Request, Sampling
from openwafer.serve.engine import open_engine
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.gpus import Gpus

MODEL = ModelConfig(
    family="llama",
    hidden_size=1536,
    num_hidden_layers=12,
    num_heads=12,
    num_kv_heads=6,
    intermediate_size=4096,
    vocab_size=4096,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
TINY = dataclasses.replace(
    MODEL, hidden_size=64, num_hidden_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=96, vocab_size=512
)
Answer = tuple[tuple[int, ...], tuple[float, ...]]  # tokens and their logprobs


def checkpoint(folder: Path, config: ModelConfig) -> Path:
    torch.manual_seed(0)
    weights = ((f"weights/{name}", weight.detach()) for name, weight in build(config).named_parameters())
    return save(folder, 1, weights, {"params": {"model": dataclasses.asdict(config)}})


def requests(vocabulary: int) -> Iterator[Request]:
    """The first is the one that is watched; some of the others begin as it does."""
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(0, vocabulary, (200,), generator=generator).tolist())
    for number in range(33):
        own = tuple(torch.randint(0, vocabulary, (5 * number,), generator=generator).tolist())
        yield Request(
            id=str(number),
            prompt=prompt[: 200 if number % 3 else 40] + own,
            sampling=Sampling(max_tokens=24 + number % 8, temperature=0.8, top_p=0.9, seed=number, num_logprobs=0),
        )


def answers(engine: Engine, asked: list[Request]) -> list[Answer]:
    queues: list[queue.Queue[Event]] = [queue.Queue() for _ in asked]
    for request, events in zip(asked, queues, strict=True):
        engine.submit(request, events.put)
    found = []
    for events in queues:
        tokens, logprobs, event = [], [], Event()
        while event.finish_reason is None:
            event = events.get(timeout=300)
            tokens += event.tokens
            logprobs += [logprob.logprob for logprob in event.logprobs]
        found.append((tuple(tokens), tuple(logprobs)))
    return found


def served(path: Path, device: str, **options: Any) -> Answer:
    """The answer to the first request; ends the bench if it is another one in a crowd."""
    config = EngineConfig(**{"device": device, "batch_invariant": device == "cuda", "kv_cache": 512 << 20} | options)
    began = time.perf_counter()
    engine, _, model = open_engine(str(path), config)
    opened = time.perf_counter() - began
    try:
        asked = list(requests(model.vocab_size))
        answers(engine, asked[:1])  # what is compiled is compiled here
        began = time.perf_counter()
        (alone,) = answers(engine, asked[:1])
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        crowd = answers(engine, asked)
        total = sum(len(tokens) for tokens, _ in crowd) / (time.perf_counter() - began)
    finally:
        engine.close()
        del engine
        gc.collect()
    way = " ".join(f"{name}={value}" for name, value in options.items()) or "whole"
    same = crowd[0] == alone
    print(
        f"{way}: opened in {opened:.1f} s, {len(alone[0]) / seconds:.0f} tokens/s alone, {total:.0f} in a crowd; "
        f"the same alone and in a crowd: {same}",
        flush=True,
    )
    if not same:
        raise SystemExit("an answer depends on who else asks")
    return alone


def others() -> int:
    """Bytes of the GPU that are taken before a model is opened, with what CUDA takes for this process."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def refused(path: Path) -> None:
    try:
        served(path, "cuda", device_memory=others() + (100 << 20))
    except UserError as error:
        print(f"refused: {error}", flush=True)
    else:
        raise SystemExit("a limit below what is needed was not refused")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = checkpoint(folder, MODEL if on_gpu else TINY)
        ways: list[dict[str, Any]] = [{}, {"num_csx": 2}, {"speculation": "lookup"}, {"prefix_cache": False}]
        if on_gpu:
            small = {"max_step_tokens": 512, "kv_cache": 100 << 20, "device_memory": (700 << 20) + others()}
            ways += [small, small | {"dram": 250 << 20, "flash": folder / "flash"}]
            ways += [small | {"num_csx": 2, "device_memory": others() + 2 * Gpus.context_bytes + (1100 << 20)}]
        expected = served(path, args.device, **ways[0])
        for way in ways[1:]:
            if served(path, args.device, **way) != expected:
                raise SystemExit("the answer depends on how the model was opened")
        for quantization in ("int8", "int4"):
            served(path, args.device, quantization=quantization)
        if on_gpu:
            refused(path)
    print("all ways give the same tokens and logprobs", flush=True)


if __name__ == "__main__":
    main()
