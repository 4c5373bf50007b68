"""Which server a request goes to, by load and by prefix."""

import pytest

from prl.engines.servers import Router, Server

A, B, C = "http://a", "http://b", "http://c"


@pytest.fixture
def router():
    return Router([Server(url) for url in (A, B, C)])


def test_the_server_with_the_fewest_sequences_is_next(router):
    chosen = []
    for n in (8, 1, 1, 1, 8, 1):
        server = router.choose(n)
        server.load += n
        chosen.append(server.url)
    assert chosen == [A, B, C, B, C, B], "loads before each: 0 0 0, 8 0 0, 8 1 0, 8 1 1, 8 2 1, 8 2 9"


def test_prefixes_are_spread_each_on_one_server(router):
    homes = {number: router.choose(1, f"group {number}") for number in range(30)}
    assert {server.url for server in homes.values()} == {A, B, C}
    for server, load in zip(router.servers, (12, 3, 8), strict=True):
        server.load = load
    assert all(router.choose(1, f"group {number}") is home for number, home in homes.items())


@pytest.mark.parametrize(
    ("here", "elsewhere", "stays"),
    [
        (15, 0, True),  # 16 with this one: few
        (16, 0, False),  # 17, and 1.25 times the mean is 7
        (141, 100, True),  # 142 with this one, and 1.25 * 342 / 3 = 142.5
        (142, 100, False),  # 143, and 142.9
    ],
)
def test_busy_server_is_left(router, here, elsewhere, stays):
    home = router.choose(1, "group")
    for server in router.servers:
        server.load = here if server is home else elsewhere
    assert (router.choose(1, "group") is home) is stays


def test_absent_servers_get_nothing_failed_ones_last(router):
    home = router.choose(1, "group")
    other, failing = (server for server in router.servers if server is not home)
    failing.failed()
    home.away = True
    other.load = 99
    assert router.choose(1, "group") is other and router.choose() is other
    other.loading = 1
    assert router.choose() is failing
    failing.away = True
    assert router.choose(1, "group") is None
    home.away = False
    assert router.choose(1, "group") is home
    home.failed()
    other.loading = None
    assert router.choose(1, "group") is other
