"""Token buckets, by a clock that the test turns."""

from pathlib import Path

import pytest

from openwafer.serve.api.errors import ApiError
from openwafer.serve.api.limits import NO_LIMIT, Bucket, Client, Clients
from openwafer.serve.keys import KeyStore


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_bucket_refills_continuously():
    clock = Clock()
    bucket = Bucket(60, 60.0, clock)
    bucket.take(60)
    assert bucket.wait_s(1) == pytest.approx(1)
    clock.now += 0.5
    assert bucket.level == pytest.approx(0.5)
    clock.now += 30
    assert bucket.wait_s(30) == 0
    clock.now += 1000
    assert bucket.level == 60
    clock.now -= 5000  # somebody set the clock back
    assert bucket.level == 60


def test_estimate_is_settled():
    client = Client(id="a", name="a", tokens=Bucket(100, 60.0, Clock()))
    assert client.take_tokens(80, is_upper_bound=False) == 80
    with pytest.raises(ApiError) as refused:
        client.take_tokens(30, is_upper_bound=False)
    assert refused.value.status == 429
    assert refused.value.headers == {"retry-after": "6", "x-should-retry": "true"}
    assert str(refused.value).endswith("try again in 6 s")
    client.settle(80, 10)
    assert client.take_tokens(90, is_upper_bound=False) == 90
    client.settle(90, 120)  # more than was estimated: a debt
    assert client.headers()[4] == (b"x-ratelimit-remaining-tokens-minute", b"0")


def test_request_that_can_never_fit():
    client = Client(id="a", name="a", tokens=Bucket(100, 60.0, Clock()))
    with pytest.raises(ApiError) as refused:
        client.take_tokens(101, is_upper_bound=False)
    assert refused.value.headers["x-should-retry"] == "false"
    assert client.take_tokens(101, is_upper_bound=True) == 100


@pytest.mark.parametrize(("limit", "words"), [(1440, "60 s"), (20, "72 min"), (5, "4 h 48 min")])
def test_it_says_in_words_how_long_to_wait(limit: int, words: str):
    client = Client(id="a", name="a", requests=Bucket(limit, 86400.0, Clock()))
    for _ in range(limit):
        client.take_request()
    with pytest.raises(ApiError, match=f"the limit of {limit} requests per day is reached: try again in {words}$"):
        client.take_request()


def test_no_limit():
    client = Client(id="a", name="a")
    client.take_request()
    assert client.take_tokens(10**9, is_upper_bound=False) == 0
    assert client.headers()[0] == (b"x-ratelimit-limit-requests-day", b"%d" % NO_LIMIT)


def test_levels_survive_a_restart(tmp_path: Path):
    store = KeyStore(tmp_path / "keys.sqlite")
    key, _ = store.create("a", requests_per_day=10, tokens_per_minute=1000)
    before = Clients(store)
    for _ in range(4):
        before.of_key(key).take_request()
    store.save_buckets(before.levels())
    after = Clients(store).of_key(key)
    assert after.requests is not None
    assert after.requests.level == pytest.approx(6, abs=0.1)
    store.close()
