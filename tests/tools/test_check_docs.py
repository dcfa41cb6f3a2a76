"""The documentation check, on small trees that are right or wrong in one way."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "check_docs.py"


def check(root: Path, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, "--root", root, *argv], capture_output=True, text=True, timeout=60)


def page(root: Path, text: str) -> Path:
    (root / "README.md").write_text(text)
    return root / "README.md"


def test_blocks_run_in_order_in_one_folder_with_the_params(tmp_path: Path) -> None:
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "tiny.yaml").write_text("x: 1\n")
    page(
        tmp_path,
        "```bash\ncat params/tiny.yaml > copy\nrm -r params\n```\n"
        "```python\nraise SystemExit('not a command')\n```\n"
        "1. in a list:\n   ```console\n   $ grep -q 'x: 1' copy\n   x: 1\n   ```\n",
    )
    assert check(tmp_path, "--run").returncode == 0
    assert (tmp_path / "params" / "tiny.yaml").exists()
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("```bash\nfalse\n```", "README.md:1: exit code 1 from\nfalse"),
        ("```bash\nfalse | true\n```", "exit code 1"),
        ("```bash\nfalse\ntrue\n```", "exit code 1"),
        ("text\n```console\n$ exit 3\n```", "README.md:2: exit code 3 from\nexit 3"),
        ("```bash\necho some words; no-such-command\n```", "some words"),
        ("```bash\nsleep 30\n```", "still running after 1 s"),
    ],
)
def test_a_command_that_fails_is_shown(tmp_path: Path, block: str, message: str) -> None:
    page(tmp_path, block)
    done = check(tmp_path, "--run", "--limit_s", "1")
    assert done.returncode == 1
    assert message in done.stderr
    assert check(tmp_path).returncode == 0  # without --run nothing runs


def test_what_is_not_meant_to_run_does_not(tmp_path: Path) -> None:
    page(tmp_path, "```bash no-run\nfalse\n```\n```bash\nmake test\ngit clone x\ncd x\nmake demo\n```\n")
    assert check(tmp_path, "--run").returncode == 0


def test_the_commands_find_this_environment_first(tmp_path: Path) -> None:
    page(tmp_path, f'```bash\ntest "$(dirname "$(command -v python)")" -ef {Path(sys.executable).parent}\n```')
    assert check(tmp_path, "--run").returncode == 0


def test_a_server_lives_until_the_page_ends(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    until = f"until test -e {alive}; do sleep 0.1; done"
    page(
        tmp_path,
        f"```bash\n(while true; do date > {alive}; sleep 0.1; done) &\n```\n"
        f"```bash\n{until}; rm {alive}; {until}\n```\n",
    )
    done = check(tmp_path, "--run")
    assert done.returncode == 0, done.stderr
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()


def test_links(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("[up](../README.md#top) [web](https://example.com) [here](#x)")
    page(tmp_path, "[a](docs/a.md) `[code](no.md)`\n```text\n[code](no.md)\n```\n")
    assert check(tmp_path).returncode == 0
    page(tmp_path, "[a](docs/a.md) ![b](docs/b.svg)")
    done = check(tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'README.md'}: the link to docs/b.svg leads nowhere\n"


@pytest.mark.parametrize(
    "text",
    ["/home" + "/ann/x", "/Users" + "/ann/x", "/root" + "/x", "https://pypi" + ".org/simple"],
)
@pytest.mark.parametrize("name", ["README.md", "openwafer/a.py", "tests/b/c.txt", ".ci/run", "Makefile"])
def test_paths_and_indexes_of_one_machine(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(f"fine\nsee {text}\n")
    done = check(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path / name}:2: names a " in done.stderr
