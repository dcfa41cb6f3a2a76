"""Rate limits: token buckets that refill continuously, and the headers that tell clients about them."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from openwafer.serve.api.errors import ApiError
from openwafer.serve.keys import Key, KeyStore

DAY_S, MINUTE_S = 86400.0, 60.0
NO_LIMIT = 2**53 - 1  # in headers: clients read numbers, and every number up to this one is exact everywhere


class Bucket:
    """Holds `capacity` and refills in `period_s`. `clock` is time.time, because levels outlive the process."""

    def __init__(self, capacity: int, period_s: float, clock: Callable[[], float] = time.time) -> None:
        self.capacity = capacity
        self._period_s = period_s
        self._clock = clock
        self._level = float(capacity)
        self._at = clock()

    def restore(self, level: float, at: float) -> None:
        self._level, self._at = min(level, self.capacity), min(at, self._clock())

    @property
    def level(self) -> float:
        """Refilled up to now; below 0 when more was used than was estimated."""
        now = self._clock()
        gained = max(now - self._at, 0.0) * self.capacity / self._period_s
        self._level, self._at = min(self._level + gained, float(self.capacity)), now
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def give_back(self, amount: float) -> None:
        self._level = min(self.level + amount, float(self.capacity))

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` can be taken."""
        return max(amount - self.level, 0.0) * self._period_s / self.capacity


@dataclass(kw_only=True)
class Client:
    """Whose request it is. `requests` and `tokens` are None without a limit."""

    id: str
    name: str
    is_admin: bool = False
    requests: Bucket | None = None
    tokens: Bucket | None = None

    def take_request(self) -> None:
        """429 when the day's requests are used up."""
        if self.requests is None:
            return
        if (wait_s := self.requests.wait_s(1)) > 0:
            raise _too_many("requests per day", self.requests.capacity, wait_s, is_soon=False)
        self.requests.take(1)

    def take_tokens(self, amount: int, is_upper_bound: bool) -> int:
        """Reserve `amount`; gives what was taken. An amount that nobody asked for is at most the whole bucket."""
        if self.tokens is None:
            return 0
        if is_upper_bound:
            amount = min(amount, self.tokens.capacity)
        if amount > self.tokens.capacity:
            raise ApiError(
                429,
                f"this request may need {amount} tokens and the key has {self.tokens.capacity} tokens per minute: "
                "ask for a smaller max_completion_tokens",
                code="tokens_per_minute_exceeded",
                headers={"x-should-retry": "false"},
            )
        if (wait_s := self.tokens.wait_s(amount)) > 0:
            raise _too_many("tokens per minute", self.tokens.capacity, wait_s, is_soon=True)
        self.tokens.take(amount)
        return amount

    def settle(self, taken: int, used: int) -> None:
        """Give back what was reserved and not used."""
        if self.tokens is not None:
            self.tokens.give_back(taken - used)

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [
            *_bucket_headers(b"requests-day", self.requests),
            *_bucket_headers(b"tokens-minute", self.tokens),
        ]


NOBODY = Client(id="", name="")  # has not shown a key; only asks what anybody may know


def _bucket_headers(kind: bytes, bucket: Bucket | None) -> list[tuple[bytes, bytes]]:
    limit = remaining = NO_LIMIT
    reset_s = 0.0
    if bucket is not None:
        limit, remaining, reset_s = bucket.capacity, max(math.floor(bucket.level), 0), bucket.wait_s(bucket.capacity)
    return [
        (b"x-ratelimit-limit-" + kind, b"%d" % limit),
        (b"x-ratelimit-remaining-" + kind, b"%d" % remaining),
        (b"x-ratelimit-reset-" + kind, b"%.3f" % reset_s),
    ]


def _too_many(what: str, limit: int, wait_s: float, *, is_soon: bool) -> ApiError:
    """Clients sleep for `retry-after` and ask again, unless we say that it is not worth it: a day's end is not."""
    return ApiError(
        429,
        f"the limit of {limit} {what} is reached: try again in {_in_words(wait_s)}",
        code=what.replace(" ", "_") + "_exceeded",
        headers={"retry-after": str(math.ceil(wait_s)), "x-should-retry": "true" if is_soon else "false"},
    )


def _in_words(wait_s: float) -> str:
    """Rounded up, so that whoever waits for it is not refused again."""
    seconds = math.ceil(wait_s)
    if seconds < 120:
        return f"{seconds} s"
    minutes = math.ceil(wait_s / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class Clients:
    """The clients with their buckets. Levels come from the store and go back to it, so a restart forgives nothing."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._clients: dict[str, tuple[Key, Client]] = {}

    def of_key(self, key: Key) -> Client:
        known = self._clients.get(key.id)
        if known is not None and known[0] == key:
            return known[1]
        client = Client(
            id=key.id,
            name=key.name,
            is_admin=key.is_admin,
            requests=self._bucket(key.id, "requests-day", key.requests_per_day, DAY_S),
            tokens=self._bucket(key.id, "tokens-minute", key.tokens_per_minute, MINUTE_S),
        )
        self._clients[key.id] = (key, client)
        return client

    def _bucket(self, key_id: str, kind: str, capacity: int | None, period_s: float) -> Bucket | None:
        if capacity is None:
            return None
        bucket = Bucket(capacity, period_s)
        if saved := self._store.load_bucket(key_id, kind):
            bucket.restore(*saved)
        return bucket

    def levels(self) -> list[tuple[str, str, float, float]]:
        """Rows for `KeyStore.save_buckets`."""
        now = time.time()
        return [
            (client.id, kind, bucket.level, now)
            for _, client in self._clients.values()
            for kind, bucket in (("requests-day", client.requests), ("tokens-minute", client.tokens))
            if bucket is not None
        ]
