"""The environment of processes that a bench starts: this repository first, whatever the caller had after it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def child_environment(**variables: str) -> dict[str, str]:
    """PYTHONPATH is prolonged, not replaced: packages may be found through it alone."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **variables}
