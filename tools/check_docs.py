"""Check the documentation: `python tools/check_docs.py` (links and paths), with `--run` also its commands.

Which commands run: every ```bash block, and the `$ ` lines of every ```console block, of the pages at the
root and in docs/. The blocks of one page run in order in one temporary folder with copies of COPIED. Left
out: blocks tagged `no-run` (as in ```bash no-run) and lines that start with one of SKIPPED. A command that
a block leaves running (a server, with `&`) lives until the page ends.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COPIED = ("params", "bench", "tools", "run.py")
SKIPPED = ("make test", "make demo", "make lint", "make bench", "git clone ", "cd ")
SCANNED = (".ci", "openwafer", "tests", "tools", "bench", "docs", "params")

# Written in pieces so that this file does not contain what it looks for.
FORBIDDEN = {
    "a home folder": re.compile(r"/(?:home|Users)" + r"/\w|/root" + r"/"),
    "a package index": re.compile(r"\bpypi" + r"\.org|pythonhosted" + r"\.org|download\.pytorch" + r"\.org"),
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block: its commands, and the line of the page where it starts."""

    line: int
    script: str


def pages(root: Path) -> list[Path]:
    return sorted(root.glob("*.md")) + sorted((root / "docs").rglob("*.md"))


def fences(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """(line number, info string, lines) of each fenced block; indented fences (in lists) count too."""
    start, info, indent, body = 0, "", "", []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"(\s*)```+(.*)", line)
        if fence and not start:
            start, info, indent, body = number, fence[2].strip(), fence[1], []
        elif fence and not fence[2].strip():
            yield start, info, body
            start = 0
        elif start:
            body.append(line.removeprefix(indent))
    if start:
        raise SystemExit(f"the ``` block that starts at line {start} is never closed")


def runnable(text: str) -> Iterator[Block]:
    for number, info, body in fences(text):
        language, *tags = info.split() or [""]
        if language == "console":
            body = [line.removeprefix("$ ") for line in body if line.startswith("$ ")]
        elif language != "bash":
            continue
        lines = [line for line in body if not f"{line.strip()} ".startswith(SKIPPED)]
        if "no-run" not in tags and any(line.strip() for line in lines):
            yield Block(line=number, script="\n".join(lines))


def broken_links(page: Path) -> Iterator[str]:
    """Relative links of the page to files that do not exist; code is not searched."""
    text = page.read_text(encoding="utf-8")
    for _, _, body in fences(text):
        text = text.replace("\n".join(body), "")
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(<?([^)\s>]+)", text):
        path = target.partition("#")[0]
        if path and not re.match(r"[a-z]+:", path) and not (page.parent / path).exists():
            yield f"{page}: the link to {target} leads nowhere"


def machine_traces(root: Path) -> Iterator[str]:
    """Places that name a home folder or a package index: they work on one machine only."""
    files = [path for path in root.iterdir() if path.is_file() and path.name != ".git"]
    for folder in SCANNED:
        files += [path for path in (root / folder).rglob("*") if path.is_file()]
    for path in sorted(files):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a binary file
        for number, line in enumerate(lines, start=1):
            for what, pattern in FORBIDDEN.items():
                if pattern.search(line):
                    yield f"{path}:{number}: names {what}: {line.strip()[:80]}"


def run_page(page: Path, root: Path, limit_s: float) -> str | None:
    """Run the page's blocks in order; the first failure as text."""
    with tempfile.TemporaryDirectory(prefix="openwafer-docs-") as folder, process_group() as group:
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy(root / name, folder)
        for block in runnable(page.read_text(encoding="utf-8")):
            failure = run_block(block, Path(folder), limit_s, group)
            if failure is not None:
                return f"{page}:{block.line}: {failure}"
    return None


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """A process group, all of whose members are killed when the block ends."""
    # Its leader does nothing but hold the number, which nobody else can get before the leader is waited for.
    leader = subprocess.Popen(["sleep", "infinity"], process_group=0)
    try:
        yield leader.pid
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()


def run_block(block: Block, folder: Path, limit_s: float, group: int) -> str | None:
    """Run one block in `folder`; what went wrong as text."""
    bin_folder = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    # Output goes to a file: a pipe would stay open as long as a server that the block left running.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", block.script],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=group,
        )
        try:
            status = f"exit code {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            status = f"still running after {limit_s:g} s"
        if process.returncode == 0:
            return None
        log.seek(0)
        return f"{status} from\n{block.script}\n--- its last output\n{log.read()[-4000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages (default: all)")
    parser.add_argument("--run", action="store_true", help="also run the commands of the pages")
    parser.add_argument("--limit_s", type=float, default=300, help="time limit of one block (default 300)")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args()
    checked = args.pages or pages(args.root)
    problems = [problem for page in checked for problem in broken_links(page)]
    if not args.pages:
        problems += machine_traces(args.root)
    if args.run:
        problems += filter(None, (run_page(page, args.root, args.limit_s) for page in checked))
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"docs: {len(checked)} pages checked, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
