import json
import subprocess
import sys

import pytest

from openwafer.cli.main import main
from openwafer.data.shards import Shards


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 50)
    return tmp_path / "a.txt"


def test_prepare_prints_one_json_object(source, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["data", "prepare", "--input", str(source), "--out", str(out), "--vocab-size=300", "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["folder"] == str(out)
    assert report["num_documents"] == 1
    assert report["train_tokens"] == len(Shards.open(out))
    assert report["val_tokens"] == len(Shards.open(out, "val"))
    assert main(argv) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 0


def test_prepare_says_what_it_made(source, tmp_path, capsys):
    assert main(["data", "prepare", "--input", str(source), "--out", str(tmp_path / "o")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("1 document, ")
    assert printed.err == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["prepare", "--out", "o"], "--input"),
        (["prepare", "--input", "nowhere", "--out", "o"], "no text found at nowhere"),
        (["prepare", "--input", "a", "--corpus", "shakespeare", "--out", "o"], "not allowed with"),
        (
            ["prepare", "--input", "a", "--out", "o", "--vocab_size", "12"],
            "--vocab_size must be at least 257",
        ),
        (["prepare", "--input", "a", "--out", "o", "--val_fraction", "x"], "--val_fraction must be a number"),
        (["prepare", "--corpus", "bible", "--out", "o"], "bible"),
        ([], "ACTION"),
        (["prepear"], "prepear"),
    ],
)
def test_mistakes_are_one_sentence(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *flags]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_torch():
    code = (
        "import sys; from openwafer.cli.main import main\n"
        "try: main(['data', 'prepare', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'tokenizers', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--val_fraction" in done.stdout
