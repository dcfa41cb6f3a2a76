"""API keys of `openwafer serve`: create one, list them with their usage, or revoke one."""

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

from openwafer.config import add_flags, flag_values, option
from openwafer.errors import UserError
from openwafer.serve.keys import Key, KeyStore, default_path


@dataclass(frozen=True, kw_only=True)
class KeyConfig:
    """Limits of a key."""

    requests_per_day: int | None = option(None, help="requests in a day (default: no limit)", minimum=1, maximum=2**53)
    tokens_per_minute: int | None = option(
        None, help="tokens in a minute (default: no limit)", minimum=1, maximum=2**53
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="create|list|revoke")
    create = actions.add_parser("create", help="make a key and show it once")
    create.add_argument("--name", metavar="TEXT", required=True, help="whose key it is")
    add_flags(create, KeyConfig, ["requests_per_day", "tokens_per_minute"])
    create.add_argument("--admin", action="store_true", help="the key may also manage keys in the console")
    listing = actions.add_parser("list", help="show all keys and what was done with them so far")
    revoke = actions.add_parser("revoke", help="refuse a key from now on")
    revoke.add_argument("key", metavar="ID|NAME", help="the key's id or name")
    for action in (create, listing, revoke):
        action.add_argument("--keys", metavar="FILE", help="file of the keys (default: in the user's data folder)")
        action.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> None:
    store = KeyStore(Path(args.keys) if args.keys else default_path())
    try:
        {"create": _create, "list": _list, "revoke": _revoke}[args.action](store, args)
    finally:
        store.close()


def _create(store: KeyStore, args: argparse.Namespace) -> None:
    config = KeyConfig(**flag_values(KeyConfig, args))
    if not args.name.strip():
        raise UserError("--name must not be empty")
    key, secret = store.create(
        args.name,
        requests_per_day=config.requests_per_day,
        tokens_per_minute=config.tokens_per_minute,
        is_admin=args.admin,
    )
    if args.json:
        print(json.dumps({**dataclasses.asdict(key), "secret": secret}))
        return
    print(secret)
    print(f"This key of {key.name} (id {key.id}) is not stored and will not be shown again.")


def _list(store: KeyStore, args: argparse.Namespace) -> None:
    keys = [{**dataclasses.asdict(key), **_totals(store, key)} for key in store.all()]
    if args.json:
        print(json.dumps({"keys": keys}))
        return
    if not keys:
        print(f"no keys in {store.path}: openwafer keys create --name NAME")
        return
    from rich.console import Console
    from rich.table import Table

    # Narrow enough for a terminal of 80 columns; of what is too long only names are broken.
    table = Table(box=None, header_style="bold", collapse_padding=True, pad_edge=False, padding=(0, 2))
    limits, totals = ("requests\nper day", "tokens\nper min"), ("requests\nso far", "tokens\nso far")
    for column in ("id", "name", "created", *limits, *totals, "state"):
        table.add_column(column, justify="right" if "\n" in column else "left", no_wrap=column != "name")
    for key in keys:
        state = "revoked" if key["revoked"] else "admin" if key["is_admin"] else "in force"
        created = time.strftime("%Y-%m-%d", time.gmtime(key["created"]))
        limited = [str(key[name] or "any") for name in ("requests_per_day", "tokens_per_minute")]
        table.add_row(key["id"], key["name"], created, *limited, str(key["requests"]), str(key["tokens"]), state)
    Console().print(table)


def _totals(store: KeyStore, key: Key) -> dict[str, int]:
    rows = [row for row in store.usage() if row.key_id == key.id]
    return {
        "requests": sum(row.requests for row in rows),
        "tokens": sum(row.prompt_tokens + row.completion_tokens for row in rows),
    }


def _revoke(store: KeyStore, args: argparse.Namespace) -> None:
    key = store.revoke(args.key)
    print(json.dumps(dataclasses.asdict(key)) if args.json else f"revoked {key.id} ({key.name})")
