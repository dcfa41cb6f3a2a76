"""Turns a failed capture into one sentence: which module, which line, what to change."""

import contextlib
import linecache
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from openwafer.errors import UserError

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)


@contextlib.contextmanager
def explained(root: nn.Module) -> Iterator[None]:
    """Errors of the model's own code inside this context become UserErrors that name module and line."""
    running: list[tuple[str, nn.Module]] = []
    failed: list[tuple[str, nn.Module]] = []  # the stack at the first error: inner modules leave before outer

    def enter(path: str) -> Any:
        return lambda module, args: running.append((path, module))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if result is None and not failed and running:
            failed.extend(running)
        running.pop()

    hooks: list[Any] = []
    for path, module in root.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        path, module = (failed or running or [("", root)])[-1]
        raise UserError(_sentence(path, module, error)) from error
    finally:
        for hook in hooks:
            hook.remove()


def _sentence(path: str, module: nn.Module, error: BaseException) -> str:
    place = f"module {path or '<root>'!r} ({type(module).__name__})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    if frames:
        frame = frames[-1]
        source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        place += f", {frame.filename}:{frame.lineno}: `{source}`"
    reason = " ".join(str(error).split())
    reason = reason if len(reason) <= 300 else reason[:297] + "..."
    return f"cannot capture {place}: {type(error).__name__}: {reason}. {_advice(error)}"


def _is_users(filename: str) -> bool:
    return not filename.startswith((_TORCH, _OURS, "<"))


def _advice(error: BaseException) -> str:
    text = f"{type(error).__name__} {error}"
    if isinstance(error, DataDependentOutputException) or "data-dependent" in text or "Data dependent" in text:
        return (
            "The code asks for the value of a tensor (`if tensor`, `.item()`, `int(tensor)`): "
            "use torch.where or a mask, or pass the value as a Python number"
        )
    if isinstance(error, DynamicOutputShapeException):
        return "The shape of a result depends on values (nonzero, boolean indexing): use a mask of fixed shape"
    if "argument" in text and isinstance(error, TypeError):
        return "Check that the example inputs match the module's forward"
    if ".numpy() is not supported" in text:
        return (
            "The forward keeps a tensor that it makes, as the cache of a transformers model does: "
            "set model.config.use_cache = False for training, "
            "and in an encoder-decoder model.decoder.config.use_cache = False too"
        )
    return "Run the module once on the same inputs outside openwafer to see whether it works there"
