"""A lock between real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from openwafer.errors import UserError
from openwafer.file_lock import FileLock

ROOT = Path(__file__).parents[1]
HOLDER = """
import sys, time
from pathlib import Path
from openwafer.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]), "busy")
print("held", flush=True)
while True:
    time.sleep(0.1)
"""


def test_another_process_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(UserError, match=r"^in use$"):
                FileLock(path, "in use")
        finally:
            holder.kill()
    FileLock(path, "in use").close()


def test_started_processes_do_not_inherit_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / ".lock", "in use")
    command = [sys.executable, "-c", "print(1, flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        lock.close()
        FileLock(tmp_path / ".lock", "in use").close()
        child.kill()


def test_two_holders_in_one_process(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock", "in use"), pytest.raises(UserError, match="in use"):
        FileLock(tmp_path / ".lock", "in use")
