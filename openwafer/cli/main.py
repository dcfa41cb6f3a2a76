"""`openwafer COMMAND ...`: find the command, parse its flags, run it, turn mistakes into one sentence."""

import argparse
import importlib
import os
import re
import sys
from typing import NoReturn

from openwafer import __version__
from openwafer.config import unknown
from openwafer.errors import UserError

COMMANDS = {
    "graph": "print the Units of a model",
    "data": "prepare text as token shards",
    "train": "train a model",
    "pull": "fetch a model or a corpus",
    "chat": "generate text with a model",
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, so that the command line has one way to complain."""

    def error(self, message: str) -> NoReturn:
        match = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        if match:
            flags = [flag for action in self._actions for flag in action.option_strings]
            message = unknown(f"flag {match[1]}", match[1], flags)
        raise UserError(message)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0, 2 for a user's mistake, 130 for Ctrl-C)."""
    argv = [_dashes(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    try:
        return _dispatch(argv)
    except UserError as error:
        print(f"openwafer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("openwafer: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `openwafer graph | head`: the reader has gone; stop quietly, and keep Python from flushing into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        print(f"openwafer {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        raise UserError(unknown(f"command {argv[0]!r}", argv[0], COMMANDS))
    command = importlib.import_module(f"openwafer.cli.{argv[0]}")
    parser = Parser(prog=f"openwafer {argv[0]}", description=command.__doc__, allow_abbrev=False)
    command.add_arguments(parser)
    command.run(parser.parse_args(argv[1:]))
    return 0


def _dashes(arg: str) -> str:
    """`--num-csx=2` and `--num_csx=2` are the same flag."""
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


def _overview() -> str:
    lines = ["usage: openwafer COMMAND [flags]", "", "commands:"]
    lines += [f"  {name:10}{summary}" for name, summary in COMMANDS.items()]
    return "\n".join([*lines, "", "`openwafer COMMAND --help` explains one command."])
