"""One server for the tests of a module."""

from collections.abc import Iterator

import pytest

from tests.serve.script_server import Running, running


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without keys."""
    with running(tmp_path_factory.mktemp("api")) as server:
        yield server
