"""Generate text with a model: one answer to PROMPT, or a conversation without it (Ctrl-D ends it)."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openwafer.config import add_flags, flag_values, option
from openwafer.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from openwafer.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How answers are drawn."""

    max_tokens: int = option(512, help="longest answer, in tokens", minimum=1)
    temperature: float = option(0.7, help="how freely tokens are drawn; 0 always takes the likeliest", minimum=0)
    top_p: float = option(
        0.95, help="draw only from the likeliest tokens that together have this probability", minimum=1e-6, maximum=1
    )
    seed: int | None = option(
        None, help="the same seed gives the same answer (default: a new one each time)", minimum=0, maximum=2**63 - 1
    )
    system: str | None = option(None, help="system message of the conversation")


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    num_tokens: int
    num_prompt_tokens: int
    finish_reason: str  # "stop" or "length"
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="pulled name, model_dir of train, Hugging Face folder, or GGUF file"
    )
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="what to answer (left out: a conversation)")
    add_flags(parser, ChatConfig, ["max_tokens", "temperature", "top_p", "seed", "system"])
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    if args.json and args.prompt is None:
        raise UserError("--json prints one answer: give PROMPT")
    config = ChatConfig(**flag_values(ChatConfig, args))
    chat = Chat(args.model, config)
    if args.prompt is None:
        _converse(chat)
        return
    answer = chat.answer(args.prompt, on_text=_ignore if args.json else _show)
    if args.json:
        print(json.dumps(_as_json(args.model, answer)))
    else:
        print()
        _report(answer)


class Chat:
    """A loaded model and the conversation so far."""

    def __init__(self, model: str, config: ChatConfig) -> None:
        from rich.console import Console

        from openwafer.models.load import load

        with Console(stderr=True).status(f"loading {model}"):
            module, tokenizer = load(model)
        if tokenizer is None:
            raise UserError(f"{model} has no tokenizer, so it cannot chat: put its tokenizer.json beside it")
        if tokenizer.chat_template is None and config.system is not None:
            raise UserError(f"{model} has no chat template: --system has no meaning for it")
        self.module: nn.Module = module
        self.tokenizer: Tokenizer = tokenizer
        self.config = config
        self.messages: list[dict[str, str]] = []
        if config.system is not None:
            self.messages.append({"role": "system", "content": config.system})

    def answer(self, prompt: str, on_text: Callable[[str], None]) -> Answer:
        """The answer to `prompt`, also given to `on_text` piece by piece, whole characters only."""
        from openwafer.models.generate import generate
        from openwafer.models.tokenizer import TextStream

        ids = self._prompt_ids(prompt)
        config, stop_ids = self.config, self.tokenizer.eos_ids
        start = time.monotonic()
        tokens = generate(self.module, ids, config.max_tokens, config.temperature, config.top_p, config.seed, stop_ids)
        stream, pieces, num_tokens = TextStream(self.tokenizer), [], 0
        for token_id in tokens:
            num_tokens += 1
            pieces.append(stream.push(token_id))
            on_text(pieces[-1])
        text = "".join(pieces)
        if self.tokenizer.chat_template is not None:
            self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        room = self.module.config.max_position_embeddings - len(ids)  # pyright: ignore
        return Answer(
            text=text,
            num_tokens=num_tokens,
            num_prompt_tokens=len(ids),
            finish_reason="length" if num_tokens == min(config.max_tokens, room) else "stop",
            elapsed_s=time.monotonic() - start,
        )

    def _prompt_ids(self, prompt: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode(prompt, add_special=True)
        messages = [*self.messages, {"role": "user", "content": prompt}]
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages))


def _converse(chat: Chat) -> None:
    # Line editing and history for input(), where the platform has them.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            prompt = input(shown)
        except EOFError:
            return
        if not prompt.strip():
            continue
        try:
            answer = chat.answer(prompt, on_text=_show)
        except KeyboardInterrupt:
            print("\n(answer stopped)", file=sys.stderr)
            continue
        print()
        _report(answer)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    pass


def _report(answer: Answer) -> None:
    print(
        f"{answer.num_tokens} tokens in {answer.elapsed_s:.2f} s ({answer.tokens_per_s:.1f} tokens/s)",
        file=sys.stderr,
    )


def _as_json(model: str, answer: Answer) -> dict[str, str | int | float]:
    return {
        "model": model,
        "text": answer.text,
        "tokens": answer.num_tokens,
        "prompt_tokens": answer.num_prompt_tokens,
        "finish_reason": answer.finish_reason,
        "tokens_per_s": round(answer.tokens_per_s, 2),
    }
