"""`make demo`: a real model trains on real text, is saved, and writes something; at most five minutes.

Every step is an ordinary `openwafer` command, shown before it runs.
"""

import shlex
import subprocess
import sys
from pathlib import Path

OUT = Path("demo_out")
NEXT = """
What to try next:
  .venv/bin/openwafer chat smollm2 "Why is the sky blue?"
  .venv/bin/openwafer serve smollm2
  .venv/bin/openwafer graph --params llama3_70b
  .venv/bin/openwafer train --params gpt_tiny --model_dir demo_out --num_steps 1000
"""


def main() -> int:
    """Run the tour; the first command that fails ends it with its exit code."""
    if (OUT / "checkpoints").is_dir():
        print(f"{OUT} has a checkpoint of an earlier demo: training goes on from there\n", flush=True)
    tour = [
        ("Fetch SmolLM2 (98 MB, Apache-2.0) and the works of Shakespeare", ["pull", "smollm2"]),
        (None, ["pull", "shakespeare"]),
        ("Train a small GPT on Shakespeare", ["train", "--params", "gpt_tiny", "--model_dir", str(OUT)]),
        ("Let it write", ["chat", str(OUT), "ROMEO.\n", "--max_tokens", "120", "--temperature", "0.8", "--seed", "1"]),
    ]
    for title, command in tour:
        if title:
            print(f"\n== {title}", flush=True)
        print(f"$ openwafer {shlex.join(command)}", flush=True)
        code = subprocess.run([sys.executable, "-m", "openwafer", *command]).returncode
        if code:
            return code
    print(NEXT)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
