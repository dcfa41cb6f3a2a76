"""The vendor's command line: `python run.py --params params.yaml --num_csx=1 --num_steps=1000 --mode=train`.

Does the same as `openwafer train`. Slides also print `--num_csx = 1`, with spaces around the sign.
"""

import re
import sys

from openwafer.cli.main import main

if __name__ == "__main__":
    joined = re.sub(r"(\x1f--[^\x1f=]+)\x1f=\x1f", r"\1=", "\x1f".join(["", *sys.argv[1:]]))
    sys.exit(main(["train", *joined.split("\x1f")[1:]]))
