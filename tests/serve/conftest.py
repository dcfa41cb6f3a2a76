"""Tiny models with random weights, one for each way a family is wired, and engines on them."""

import itertools
import queue
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from openwafer.models.build import build
from openwafer.models.config import ModelConfig, RopeScaling
from openwafer.models.load import StoredModel
from openwafer.models.weights import everything
from openwafer.serve.core import Event, Request, Sampling, TokenLogprob
from openwafer.serve.engine import LocalEngine
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.loading import load_program
from openwafer.serve.native import NativeRunner
from openwafer.serve.program import Program
from openwafer.serve.speculation import Speculator

_LLAMA = {
    "family": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": ModelConfig(**_LLAMA),
    "llama3": ModelConfig(
        **_LLAMA,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(factor=8.0, original_max_position_embeddings=64),
    ),
    "qwen2": ModelConfig(**_LLAMA, qkv_bias=True),
    "qwen3": ModelConfig(**_LLAMA, qk_norm=True, head_dim=32),
    "mistral": ModelConfig(**_LLAMA, sliding_window=20),
    "gemma3": ModelConfig(
        **_LLAMA | {"num_hidden_layers": 3},
        gemma_norms=True,
        qk_norm=True,
        activation="gelu_tanh",
        sliding_window=20,
        sliding_window_pattern=3,
        rope_local_theta=100.0,
        attention_scale=0.2,
        tie_word_embeddings=True,
    ),
    "gpt": ModelConfig(
        hidden_size=48, num_hidden_layers=2, num_heads=3, vocab_size=101, max_position_embeddings=256, activation="gelu"
    ),
    "odd": ModelConfig(  # nothing fills a vector, a group or a block
        **_LLAMA | {"hidden_size": 36, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 50}, head_dim=10
    ),
}


def tiny_module(config: ModelConfig, seed: int = 0) -> nn.Module:
    """A model whose answers vary: its weights are larger than those of a fresh one."""
    torch.manual_seed(seed)
    module = build(config).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            scale = 0.5 if "embed" in name or "wte" in name else 0.15
            weight.copy_(torch.randn_like(weight) * scale + (1.0 if "norm" in name and not config.gemma_norms else 0.0))
    return module


def stored(module: nn.Module) -> StoredModel:
    config = module.config
    assert isinstance(config, ModelConfig)
    names = {name: weight.detach() for name, weight in module.named_parameters()}
    return StoredModel(
        path=Path("tiny"),
        config=config,
        tensors=lambda wanted=everything: ((name, tensor) for name, tensor in names.items() if wanted(name)),
        kinds=lambda: dict.fromkeys(names, "F32"),
        tokenizer=lambda: None,
    )


def tiny_program(config: ModelConfig, **engine: object) -> Program:
    return load_program(stored(tiny_module(config)), EngineConfig(**engine))  # pyright: ignore[reportArgumentType]


@dataclass
class Answer:
    """All that came back for a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    last: Event = field(default_factory=Event)


class Client:
    """Submits requests to an engine and collects the answers."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self._ids = (f"request-{number}" for number in itertools.count())

    def start(self, request: Request) -> "queue.Queue[Event]":
        events: queue.Queue[Event] = queue.Queue()
        self.engine.submit(request, events.put)
        return events

    def request(self, prompt: Sequence[int], client: str = "", prediction: Sequence[int] = (), **sampling) -> Request:
        constraint = sampling.pop("constraint", None)
        return Request(
            id=next(self._ids),
            prompt=tuple(prompt),
            sampling=Sampling(**{"max_tokens": 8, "temperature": 0.0} | sampling),
            constraint=constraint,
            prediction=tuple(prediction),
            client=client,
        )

    def ask(self, prompt: Sequence[int], **sampling) -> Answer:
        return self.wait(self.start(self.request(prompt, **sampling)))

    def wait(self, events: "queue.Queue[Event]") -> Answer:
        answer = Answer()
        while answer.last.finish_reason is None:
            answer.last = events.get(timeout=60)
            answer.tokens += answer.last.tokens
            answer.logprobs += answer.last.logprobs
            answer.prompt_logprobs = answer.last.prompt_logprobs or answer.prompt_logprobs
        return answer

    def ask_in_a_crowd(self, prompt: list[int], **sampling) -> Answer:
        """Among 32 others of all lengths, some with the same beginning."""
        rng = random.Random(1)
        started = []
        for number in range(33):
            if number == 16:
                started.append(self.start(self.request(prompt, **sampling)))
                continue
            other = prompt[: 1 + number]
            if number % 3:
                other = prompt[:20] + [rng.randrange(101) for _ in range(1 + number)]
            started.append(self.start(self.request(other, max_tokens=5 + number, temperature=1.0)))
        return [self.wait(events) for events in started][16]


OpenTiny = Callable[..., Client]


@pytest.fixture
def open_tiny() -> Iterator[OpenTiny]:
    """`open_tiny(config, num_blocks=..., **engine options)`: a client of an engine on a tiny model."""
    opened: list[LocalEngine] = []

    def open_(
        config: ModelConfig = CONFIGS["llama"], *, num_blocks: int = 64, speculator: Speculator | None = None, **engine
    ) -> Client:
        chosen = EngineConfig(**{"num_threads": 2, "max_step_tokens": 32} | engine)
        program = load_program(stored(tiny_module(config)), chosen)
        runner = NativeRunner(
            program,
            num_blocks=num_blocks,
            max_rows=chosen.max_step_tokens,
            half_cache=program.is_packed,
            num_threads=chosen.num_threads,
        )
        context = min(config.max_position_embeddings, num_blocks * runner.block_size)
        opened.append(LocalEngine(runner, config, chosen, max_context=context, speculator=speculator))
        return Client(opened[-1])

    yield open_
    for engine in opened:
        engine.close()
