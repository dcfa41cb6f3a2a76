"""API keys and what was done with them, in one SQLite file (WAL, so that the server and `openwafer keys` share it).

A key is `ow-ID-SECRET`. Only the SHA-256 of the whole is stored: the secret has 256 random bits, so there is
nothing to guess and no need for a slow hash. ID finds the row; the hash is compared in constant time.
"""

import datetime
import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openwafer.errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    hash BLOB NOT NULL,
    is_admin INTEGER NOT NULL,
    requests_per_day INTEGER,
    tokens_per_minute INTEGER,
    created REAL NOT NULL,
    revoked REAL
) STRICT;
CREATE TABLE IF NOT EXISTS usage (
    key_id TEXT NOT NULL,
    model TEXT NOT NULL,
    day TEXT NOT NULL,
    requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (key_id, model, day)
) STRICT;
CREATE TABLE IF NOT EXISTS buckets (
    key_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    level REAL NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (key_id, kind)
) STRICT;
"""
_KEY = re.compile(r"ow-([0-9a-f]{12})-[\w-]{43}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key without its secret; limits that are None do not limit."""

    id: str
    name: str
    is_admin: bool = False
    requests_per_day: int | None = None
    tokens_per_minute: int | None = None
    created: float = 0.0
    revoked: float | None = None


@dataclass(frozen=True, kw_only=True)
class DayUsage:
    """What one key did with one model on one day (UTC, as 2026-01-31)."""

    key_id: str
    model: str
    day: str
    requests: int
    prompt_tokens: int
    completion_tokens: int


def default_path() -> Path:
    """$OPENWAFER_KEYS, else a file in the user's data folder."""
    if chosen := os.environ.get("OPENWAFER_KEYS"):
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    if base.startswith("~"):
        raise UserError("this user has no home folder: say where keys are kept with --keys FILE")
    return Path(base) / "openwafer" / "keys.sqlite"


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


class KeyStore:
    """The file. One connection, used under a lock, by any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Nobody but the owner reads names, hashes and usage.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(path, timeout=10, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"cannot keep API keys in {path}: {error}; name another file with --keys FILE") from None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def create(
        self,
        name: str,
        *,
        requests_per_day: int | None = None,
        tokens_per_minute: int | None = None,
        is_admin: bool = False,
    ) -> tuple[Key, str]:
        """A new key and its secret, which is shown this once."""
        key_id = secrets.token_hex(6)
        secret = f"ow-{key_id}-{secrets.token_urlsafe(32)}"
        key = Key(
            id=key_id,
            name=name,
            is_admin=is_admin,
            requests_per_day=requests_per_day,
            tokens_per_minute=tokens_per_minute,
            created=time.time(),
        )
        row = (key_id, name, _hash(secret), is_admin, requests_per_day, tokens_per_minute, key.created)
        with self._transaction() as db:
            db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, NULL)", row)
        return key, secret

    def all(self) -> list[Key]:
        """All keys, also revoked ones, oldest first."""
        with self._lock:
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created").fetchall()
        return [_key(row) for row in rows]

    def has_keys(self) -> bool:
        """Whether any key is in force."""
        with self._lock:
            return self._db.execute("SELECT 1 FROM keys WHERE revoked IS NULL LIMIT 1").fetchone() is not None

    def revoke(self, id_or_name: str) -> Key:
        matches = [key for key in self.all() if key.revoked is None and id_or_name in (key.id, key.name)]
        if not matches:
            raise UserError(f"no key in force has the id or name {id_or_name!r}: see openwafer keys list")
        if len(matches) > 1:
            raise UserError(f"{len(matches)} keys have the name {id_or_name!r}: revoke by id, see openwafer keys list")
        with self._transaction() as db:
            db.execute("UPDATE keys SET revoked = ? WHERE id = ?", (time.time(), matches[0].id))
        return matches[0]

    def find(self, secret: str) -> Key | None:
        """The key in force with this secret."""
        match = _KEY.fullmatch(secret)
        key_id = match[1] if match else ""
        with self._lock:
            row = self._db.execute(
                f"SELECT {_COLUMNS}, hash FROM keys WHERE id = ? AND revoked IS NULL", (key_id,)
            ).fetchone()
        stored = row[-1] if row else bytes(32)
        is_right = hmac.compare_digest(_hash(secret), stored)
        return _key(row) if row and is_right else None

    def add_usage(self, rows: Iterable[DayUsage]) -> None:
        values = [(r.key_id, r.model, r.day, r.requests, r.prompt_tokens, r.completion_tokens) for r in rows]
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                "completion_tokens = completion_tokens + excluded.completion_tokens",
                values,
            )

    def usage(self, since_day: str = "") -> list[DayUsage]:
        columns = "key_id, model, day, requests, prompt_tokens, completion_tokens"
        with self._lock:
            rows = self._db.execute(
                f"SELECT {columns} FROM usage WHERE day >= ? ORDER BY day, key_id, model", (since_day,)
            ).fetchall()
        names = columns.split(", ")
        return [DayUsage(**dict(zip(names, row, strict=True))) for row in rows]

    def load_bucket(self, key_id: str, kind: str) -> tuple[float, float] | None:
        """(level, time.time() when it was that) as last saved."""
        with self._lock:
            query = "SELECT level, at FROM buckets WHERE key_id = ? AND kind = ?"
            return self._db.execute(query, (key_id, kind)).fetchone()

    def save_buckets(self, rows: Iterable[tuple[str, str, float, float]]) -> None:
        """Rows of (key id, kind, level, time)."""
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?)", list(rows))


_COLUMNS = "id, name, is_admin, requests_per_day, tokens_per_minute, created, revoked"


def _key(row: tuple) -> Key:
    key_id, name, is_admin, requests_per_day, tokens_per_minute, created, revoked = row[:7]
    return Key(
        id=key_id,
        name=name,
        is_admin=bool(is_admin),
        requests_per_day=requests_per_day,
        tokens_per_minute=tokens_per_minute,
        created=created,
        revoked=revoked,
    )


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()
