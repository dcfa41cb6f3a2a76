"""Fuzz every route of the OpenAPI document with schemathesis: no answer may be a 500, all must be as documented.

    pip install -c constraints.txt -e '.[fuzz]'
    python bench/fuzz_api.py [--examples 200] [--seed 1]

The server runs over an engine that computes nothing, so that a request takes as long as the server does. In
the document that is fuzzed `model` has the one name that is served: else nearly every request would end with
404. Exits with 1 when a check fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _null_server import null_server

KEY = "fuzz"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def patched(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the served name wherever a model is asked for."""
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": "null"}
    return document


def fuzz(url: str, num_examples: int, seed: int) -> int:
    with urllib.request.urlopen(f"{url}/openapi.json") as response:
        document = patched(json.load(response))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "openapi.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", str(path)]
        command += ["--url", url, "--checks", CHECKS, "--max-examples", str(num_examples), "--seed", str(seed)]
        command += ["--header", f"authorization: Bearer {KEY}", "--continue-on-failure", "--no-color"]
        return subprocess.run(command, cwd=folder).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=200, help="generated requests per route (default 200)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if find_spec("schemathesis") is None:
        raise SystemExit("schemathesis is not installed: pip install -c constraints.txt -e '.[fuzz]'")
    with null_server(max_context=512, api_key=KEY, host="127.0.0.1") as server:
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while server.service.state != "ready":
            time.sleep(0.01)
        code = fuzz(server.url, args.examples, args.seed)
        server.should_exit = True
        thread.join(timeout=30)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
