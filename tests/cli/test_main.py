"""The command line as a user meets it: real processes, their output and their exit codes.

`probe` is a command from outside the package, so that these tests do not depend on what a real one does.
"""

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openwafer import __version__
from openwafer.cli import main as cli

ROOT = Path(cli.__file__).parent.parent.parent

PROBE = '''
"""Only for tests."""
import time
from openwafer.errors import UserError

def add_arguments(parser):
    parser.add_argument("--num_csx", type=int, default=1, help="number of systems")
    parser.add_argument("--fail", help="a mistake to report")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--lost", action="store_true")

def run(args):
    if args.fail:
        raise UserError(args.fail)
    if args.lost:
        raise BrokenPipeError("a worker")
    print(args.num_csx, args.words, flush=True)
    while args.wait:
        time.sleep(0.1)  # a signal just before a long sleep would be seen only after it
'''

GROUP = '''
"""A command with subcommands."""

def add_arguments(parser):
    commands = parser.add_subparsers(required=True, metavar="ACTION")
    commands.add_parser("prepare").add_argument("--tokenizer")

def run(args):
    print(args.tokenizer)
'''

# The SIGINT handler of a shell's foreground job, even if the tests run in the background of one.
DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import openwafer.cli
from openwafer.cli import main
openwafer.cli.__path__.append(sys.argv[1])
main.COMMANDS.update(probe="for tests", group="for tests")
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "probe.py").write_text(PROBE)
    (folder / "group.py").write_text(GROUP)
    return [sys.executable, "-c", DRIVER, str(folder)]


def run(command: list[str], *argv: str, **options) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([*command, *argv], cwd=ROOT, text=True, **pipes)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(argv: list[str]) -> None:
    done = run([sys.executable, "-m", "openwafer"], *argv)
    assert (done.returncode, done.stderr) == (0, "")
    for name, summary in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{summary}$", done.stdout, re.MULTILINE)


def test_version() -> None:
    assert run([sys.executable, "-m", "openwafer"], "--version").stdout == f"openwafer {__version__}\n"


def test_help_takes_less_than_0_3_s_more_than_python_itself() -> None:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def best_of_3(*argv: str) -> float:
        """Of processor time: other work on the machine does not count."""

        def once() -> float:
            start = used()
            subprocess.run([sys.executable, *argv], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            return used() - start

        return min(once() for _ in range(3))

    assert best_of_3("-m", "openwafer", "--help") - best_of_3("-c", "pass") < 0.3


def test_help_imports_nothing_heavy() -> None:
    script = "import sys; from openwafer.cli.main import main; main(['--help']); print(*sys.modules)"
    modules = run([sys.executable, "-c", script]).stdout.splitlines()[-1].split()
    assert "yaml" in modules
    assert not {"torch", "numpy", "transformers", "tokenizers", "gguf", "rich", "jinja2"} & set(modules)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command 'trian': did you mean 'train'?"),
        (["zzz"], "unknown command 'zzz': known: chat, "),
        (["a\nb"], r"unknown command 'a\nb': "),
        (["--vresion"], "unknown flag --vresion: did you mean '--version'?"),
        (["probe", "--num-cxs", "2"], "unknown flag --num_cxs: did you mean '--num_csx'?"),
        (["probe", "--num"], "unknown flag --num: "),
        (["probe", "--num_csx"], "argument --num_csx: expected one argument"),
        (["probe", "--num_csx", "two"], "argument --num_csx: invalid int value: 'two'"),
        (["probe", "--fail", "it\nbroke\x1b[31m"], r"it\nbroke\x1b[31m"),
        (["group", "prepare", "--tokeniser", "x"], "unknown flag --tokeniser: did you mean '--tokenizer'?"),
        (["group", "prepare", "--token", "x"], "unknown flag --token: did you mean '--tokenizer'?"),
        (["group"], "the following arguments are required: ACTION"),
        (["group", "cook"], "argument ACTION: invalid choice: 'cook' (choose from "),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(command, argv: list[str], message: str) -> None:
    done = run(command, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"openwafer: {message}")
    assert done.stderr.endswith("\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("flag", ["--num-csx=3", "--num_csx=3"])
def test_flags_accept_dashes_and_underscores(command, flag: str) -> None:
    assert run(command, "probe", flag).stdout == "3 []\n"


def test_values_and_what_follows_a_bare_double_dash_are_left_alone(command) -> None:
    assert run(command, "probe", "a-b", "--", "--c-d").stdout == "1 ['a-b', '--c-d']\n"
    assert run(command, "probe", "--fail=x-y").stderr == "openwafer: x-y\n"


def test_the_help_of_a_command(command) -> None:
    done = run(command, "probe", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: openwafer probe")
    assert "number of systems" in done.stdout


def test_ctrl_c_exits_with_130_and_no_traceback(command) -> None:
    with subprocess.Popen(
        [*command, "probe", "--wait"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1 []\n"  # the command is running
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (130, "openwafer: interrupted\n")


@pytest.mark.parametrize("argv", [["--help"], ["probe"], ["probe", "--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_mistake(command, argv: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(command, *argv, stdout=writer, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_broken_pipe_is_a_failure(command) -> None:
    done = run(command, "probe", "--lost")
    assert done.returncode == 1
    assert done.stderr.endswith("BrokenPipeError: a worker\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line(command) -> None:
    with open("/dev/full", "w") as full:
        done = run(command, "--help", stdout=full)
    assert done.returncode == 2
    assert done.stderr == "openwafer: no space left on the device of the output\n"
