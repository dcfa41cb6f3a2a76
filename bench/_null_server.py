"""Servers for benches of the HTTP side: over an engine that computes nothing, or over any other."""

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WORD = " token"


class NullEngine:
    """Keeps the engine protocol and computes nothing; `step_s` paces it."""

    def __init__(self, token: int, vocab_size: int, step_s: float = 0.0, max_context: int = 1 << 16) -> None:
        self.max_context, self.vocab_size = max_context, vocab_size
        self._token, self._step_s = token, step_s
        self._lock = threading.Condition()
        self._running: dict[str, list[Any]] = {}
        self._is_closed = False
        threading.Thread(target=self._loop, daemon=True).start()

    def submit(self, request: Any, on_event: Callable[[Any], None]) -> None:
        with self._lock:
            self._running[request.id] = [request, on_event, 0, time.monotonic()]
            self._lock.notify()

    def cancel(self, request_id: str) -> None:
        from openwafer.serve.core import Event

        with self._lock:
            found = self._running.pop(request_id, None)
        if found is not None:
            found[1](Event(finish_reason="cancelled"))

    def stats(self) -> Any:
        from openwafer.serve.core import EngineStats

        return EngineStats(num_running=len(self._running), last_progress_s=time.monotonic())

    def close(self) -> None:
        self._is_closed = True

    def _loop(self) -> None:
        from openwafer.serve.core import Event

        event = Event(tokens=(self._token,))
        while not self._is_closed:
            with self._lock:
                while not self._running and not self._is_closed:
                    self._lock.wait(0.1)
                batch = list(self._running.values())
            # A step of a real engine takes time, in which the server can work: hand the processor over.
            time.sleep(self._step_s)
            for entry in batch:
                request, on_event, written, began = entry
                entry[2] = written + 1
                if written + 1 < request.sampling.max_tokens:
                    on_event(event)
                    continue
                with self._lock:
                    self._running.pop(request.id, None)
                on_event(self._last(request, began))

    def _last(self, request: Any, began: float) -> Any:
        from openwafer.serve.core import Event, Usage

        num, elapsed = request.sampling.max_tokens, time.monotonic() - began
        usage = Usage(num_prompt_tokens=len(request.prompt), num_completion_tokens=num, completion_s=elapsed)
        return Event(tokens=(self._token,), finish_reason="length", usage=usage)


def bench_tokenizer() -> Any:
    """A byte-level vocabulary with one whole word, and the shortest chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from openwafer.models.tokenizer import Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate([*alphabet, WORD.replace(" ", "\u0120"), "<|end|>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    return Tokenizer(backend, chat_template=template, eos_ids=[257])


def word_tokenizer(num_words: int, mark: str) -> Any:
    """A vocabulary in which every id, also one drawn at random, is a word beginning with `mark`. None of them ends."""
    import tokenizers
    from tokenizers import decoders, models

    from openwafer.models.tokenizer import Tokenizer

    start = mark.replace(" ", "\u0120")
    vocab = {f"{start}{number}": number for number in range(num_words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@contextlib.contextmanager
def null_server(
    step_s: float = 0.0, model: str | None = None, max_context: int = 1 << 16, **settings: Any
) -> Iterator[Any]:
    """An ApiServer on a free port, to be run by the caller; with `model` a real engine instead of the null one."""
    from openwafer.serve.api.served_model import ServedModel

    def load() -> ServedModel:
        if model is None:
            return ServedModel.make(("null",), NullEngine(256, 258, step_s, max_context), bench_tokenizer())
        from openwafer.serve.engine import EngineConfig, open_engine

        # So little that it is all in use within a minute (memory is then flat), and that requests have to give way.
        engine, tokenizer, _ = open_engine(model, EngineConfig(kv_cache=64 << 20))
        assert tokenizer is not None
        return ServedModel.make(("null",), engine, tokenizer)

    with server_of(load, "null", **settings) as server:
        yield server


@contextlib.contextmanager
def server_of(load: Callable[[], Any], name: str, **settings: Any) -> Iterator[Any]:
    """An ApiServer on a free port for the ServedModel that `load` gives, to be run by the caller."""
    from openwafer.serve.api.config import ServeConfig
    from openwafer.serve.api.server import ApiServer
    from openwafer.serve.api.service import Service
    from openwafer.serve.keys import KeyStore

    with tempfile.TemporaryDirectory() as folder:
        service = Service(ServeConfig(port=0, **settings), KeyStore(Path(folder) / "keys"), (name,))
        yield ApiServer(service, load)
