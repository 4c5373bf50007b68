"""One server for the tests that need none of their own."""

import pytest
from tinker_server import running


@pytest.fixture(scope="session")
def client(tmp_path_factory):
    with running(tmp_path_factory.mktemp("tinker")) as client:
        yield client
