"""`openwafer COMMAND ...`: find the command, parse its flags, run it, turn mistakes into one sentence."""

import argparse
import errno
import importlib
import os
import re
import select
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from openwafer import __version__
from openwafer.config import unknown
from openwafer.errors import UserError
from openwafer.interrupt import LeaveAtOnce

COMMANDS = {
    "graph": "print the Units of a model",
    "data": "prepare text as token shards",
    "train": "train a model",
    "simulate": "run a kernel on the simulated wafer",
    "pull": "fetch a model or a corpus",
    "chat": "generate text with a model",
    "serve": "serve a model over HTTP",
    "keys": "make, list and revoke API keys",
    "import": "make a Hugging Face or GGUF model trainable",
    "export": "write a trained model as a Hugging Face folder",
}
_MODULES = {"import": "import_model"}  # where the command's name is no name for a module


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, so that the command line has one way to complain."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Also for subparsers, which argparse makes itself: an abbreviation may mean another flag tomorrow.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._is_used = False

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self._is_used = True
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        match = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        if match:
            message = unknown(f"flag {match[1]}", match[1], dict.fromkeys(self._flags()))
        raise UserError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # while `main` still looks after a reader that has gone
        super().exit(status, message)

    def _flags(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                # An unknown flag of `data prepare` is reported by the parser of `data`.
                parsers = action.choices.values()
                for subparser in [parser for parser in parsers if parser._is_used] or parsers:
                    yield from subparser._flags()


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0, 2 for a user's mistake, 130 for Ctrl-C)."""
    argv = _dashes(sys.argv[1:] if argv is None else argv)
    try:
        _dispatch(argv)
        sys.stdout.flush()
        return 0
    except UserError as error:
        print(f"openwafer: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("openwafer: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        _silence_stdout()
        return 0  # `openwafer graph | head` has seen enough
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _silence_stdout()
        print(f"openwafer: no space left on {error.filename or 'the device of the output'}", file=sys.stderr)
        return 2


def _reader_has_gone() -> bool:
    """Whether stdout is a pipe that nobody reads: other broken pipes (a lost worker) are real failures."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _silence_stdout() -> None:
    """Keep Python's own flush at exit from failing a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
    elif argv[0] == "--version":
        print(f"openwafer {__version__}")
    elif argv[0] in COMMANDS:
        with LeaveAtOnce():
            command = importlib.import_module(f"openwafer.cli.{_MODULES.get(argv[0], argv[0])}")
            parser = Parser(prog=f"openwafer {argv[0]}", description=command.__doc__)
            command.add_arguments(parser)
        command.run(parser.parse_args(argv[1:]))
    elif argv[0].startswith("-"):
        raise UserError(unknown(f"flag {argv[0]}", argv[0], ("--help", "--version")))
    else:
        raise UserError(unknown(f"command {argv[0]!r}", argv[0], COMMANDS))


def _dashes(argv: list[str]) -> list[str]:
    """`--num-csx=2` and `--num_csx=2` are the same flag; what follows a bare `--` is left alone."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [re.sub(r"^--[^=]+", _underscores, arg) for arg in argv[:end]] + argv[end:]


def _underscores(flag: re.Match[str]) -> str:
    return "--" + flag[0][2:].replace("-", "_")


def _one_line(text: str) -> str:
    """Whatever a user typed may be quoted in an error: control characters are shown, not obeyed."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _overview() -> str:
    lines = ["usage: openwafer COMMAND [flags]", "", "commands:"]
    lines += [f"  {name:10}{summary}" for name, summary in COMMANDS.items()]
    return "\n".join([*lines, "", "`openwafer COMMAND --help` explains one command."])
