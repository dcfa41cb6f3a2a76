"""The key store: what it keeps, what it must not keep, and two processes at once."""

import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openwafer.cli.main import main
from openwafer.errors import UserError
from openwafer.serve.keys import DayUsage, KeyStore, default_path


def test_create_find_revoke(tmp_path: Path):
    store = KeyStore(tmp_path / "sub" / "keys.sqlite")
    assert not store.has_keys()
    key, secret = store.create("me", requests_per_day=5, is_admin=True)
    other, _ = store.create("you")
    assert store.has_keys()
    assert store.find(secret) == key
    for wrong in (
        "",
        "ow-",
        secret[:-1],
        secret + "x",
        secret.replace(key.id, other.id),
        "ow-" + "0" * 12 + "-" + "A" * 43,
        "ü",
    ):
        assert store.find(wrong) is None
    with pytest.raises(UserError, match="no key in force"):
        store.revoke("nobody")
    store.create("me")
    with pytest.raises(UserError, match="2 keys have the name"):
        store.revoke("me")
    store.revoke(key.id)
    assert store.find(secret) is None
    assert [k.revoked is None for k in store.all()] == [False, True, True]
    store.close()


def test_secret_is_not_in_the_file(tmp_path: Path):
    path = tmp_path / "keys.sqlite"
    store = KeyStore(path)
    _, secret = store.create("me")
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"me" in stored
    assert secret.encode() not in stored
    assert secret.split("-", 2)[2].encode() not in stored
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    store.close()


def test_usage_adds_up(tmp_path: Path):
    store = KeyStore(tmp_path / "keys.sqlite")
    row = DayUsage(key_id="a", model="m", day="2026-01-31", requests=1, prompt_tokens=2, completion_tokens=3)
    later = DayUsage(key_id="a", model="m", day="2026-02-01", requests=1, prompt_tokens=2, completion_tokens=3)
    store.add_usage([row, row])
    store.add_usage([row, later])
    assert [(u.day, u.requests, u.prompt_tokens, u.completion_tokens) for u in store.usage()] == [
        ("2026-01-31", 3, 6, 9),
        ("2026-02-01", 1, 2, 3),
    ]
    assert store.usage("2026-02-01") == [later]
    store.close()


def test_command_line_while_a_server_has_the_file_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "keys.sqlite"
    store = KeyStore(path)
    command = [sys.executable, "-m", "openwafer", "keys", "create", "--name", "ci", "--tokens-per-minute", "9"]
    done = subprocess.run([*command, "--keys", str(path)], capture_output=True, text=True, check=True)
    key = store.find(done.stdout.splitlines()[0])
    assert key is not None
    assert (key.name, key.tokens_per_minute) == ("ci", 9)
    assert main(["keys", "list", "--keys", str(path)]) == 0
    told = capsys.readouterr().out
    assert key.id in told
    # Whole, also in a terminal of 80 columns.
    assert time.strftime("%Y-%m-%d", time.gmtime(key.created)) in told
    assert max(map(len, told.splitlines())) <= 80
    assert main(["keys", "revoke", "ci", "--keys", str(path)]) == 0
    assert store.find(done.stdout.splitlines()[0]) is None
    assert main(["keys", "revoke", "ci", "--keys", str(path)]) == 2
    assert main(["keys", "create", "--name", " ", "--keys", str(path)]) == 2
    assert main(["keys", "create", "--name", "x", "--requests-per-day", "0", "--keys", str(path)]) == 2
    assert "at least 1" in capsys.readouterr().err
    store.close()


def test_bad_files(tmp_path: Path):
    (tmp_path / "keys.sqlite").write_text("this is not a database, however long it may be" * 50)
    with pytest.raises(UserError, match="cannot keep API keys"):
        KeyStore(tmp_path / "keys.sqlite")
    with pytest.raises(UserError, match="cannot keep API keys"):
        KeyStore(tmp_path)


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("OPENWAFER_KEYS", str(tmp_path / "k"))
    assert default_path() == tmp_path / "k"
    monkeypatch.delenv("OPENWAFER_KEYS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_path() == tmp_path / "openwafer" / "keys.sqlite"
