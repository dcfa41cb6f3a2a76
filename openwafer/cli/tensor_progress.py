"""The tensor that is being worked on, shown on stderr."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def tensor_progress(what: str) -> Iterator[Callable[[str], None]]:
    """Gives a function to call with each tensor's name; nothing is shown when stderr is not a terminal."""
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda name: status.update(f"{what} {name}")
