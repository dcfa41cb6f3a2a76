"""A real server on a real socket, with an engine that writes what the prompt asks for."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from openwafer.models.tokenizer import Tokenizer
from openwafer.serve.api.config import ServeConfig
from openwafer.serve.api.served_model import ServedModel
from openwafer.serve.api.server import ApiServer
from openwafer.serve.api.service import Service
from openwafer.serve.core import Request
from openwafer.serve.keys import KeyStore
from tests.serve.script_engine import ScriptEngine

EOS = 1
TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "\nCall as <tool_call>...</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Bytes and a few pairs of them as tokens: characters beyond ASCII come in pieces."""
    vocab = {"<|im_start|>": 0, "<|im_end|>": EOS}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    merges = [("a", "b"), ("e", "n"), ("t", "h"), ("E", "N"), ("h", "e")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_template=TEMPLATE, eos_ids=[EOS])


TOKENIZER = byte_tokenizer()


def said(request: Request) -> list[int]:
    """The answer is what stands between SAY<< and >>END in the prompt, else a greeting."""
    prompt = TOKENIZER.decode(request.prompt)
    _, _, rest = prompt.rpartition("SAY<<")
    text = rest.partition(">>END")[0] if rest else "Hello from the script."
    return TOKENIZER.encode(text) + [EOS]


def say(text: str) -> list[dict[str, Any]]:
    """Messages that make the engine answer `text`."""
    return [{"role": "user", "content": f"SAY<<{text}>>END"}]


@dataclass
class Running:
    """A server in a thread of this process."""

    server: ApiServer
    service: Service
    engine: ScriptEngine
    store: KeyStore
    url: str
    http: httpx.Client

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def stream(self, path: str, body: Any) -> Any:
        return self.http.stream("POST", path, json=body)

    def chat(self, messages: Any, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": "script", "messages": messages, **fields})

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.http.get(path, **kwargs)

    def wait_idle(self) -> None:
        """Until the engine holds no request."""
        deadline = time.monotonic() + 60
        while (stats := self.engine.stats()).num_running + stats.num_waiting:
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)


@contextlib.contextmanager
def running(
    folder: Path,
    engine: ScriptEngine | None = None,
    gate: threading.Event | None = None,
    tool_call_parser: str = "auto",
    **settings: Any,
) -> Iterator[Running]:
    """Serve until the block ends; loading the model takes until `gate` is set."""
    engine = engine or ScriptEngine(said, vocab_size=TOKENIZER.vocab_size)
    store = KeyStore(folder / "keys.sqlite")
    service = Service(ServeConfig(port=0, **settings), store, ("script", "org/script"))
    served = ServedModel.make(("script", "org/script"), engine, TOKENIZER, tool_call_parser=tool_call_parser)

    def load() -> ServedModel:
        if gate is not None:
            gate.wait(20)
        return served

    server = ApiServer(service, load)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started or (gate is None and service.state != "ready"):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with httpx.Client(base_url=server.url, timeout=120) as http:
            yield Running(server, service, engine, store, server.url, http)
    finally:
        server.should_exit = True
        thread.join(timeout=120)
        assert not thread.is_alive(), "the server did not stop"
        engine.close()
        store.close()
