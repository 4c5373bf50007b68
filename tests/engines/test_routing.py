"""Which server a request goes to, by load and by prefix."""

import pytest

from prl.engines.routing import Prefix, Router, Server

A, B, C = "http://a", "http://b", "http://c"


@pytest.fixture
def router():
    servers = [Server(url) for url in (A, B, C)]
    return Router(servers, {server.url: 0 for server in servers})


def turn(group, conversation):
    return Prefix(f"g{group}", f"g{group}/{conversation}")


def test_the_server_with_the_fewest_sequences_is_next(router):
    chosen = []
    for n in (8, 1, 1, 1, 8, 1):
        server = router.choose(n)
        router.load[server.url] += n
        chosen.append(server.url)
    assert chosen == [A, B, C, B, C, B], "loads before each: 0 0 0, 8 0 0, 8 1 0, 8 1 1, 8 2 1, 8 2 9"


def test_a_conversation_stays_where_its_last_turn_was(router):
    first = router.choose(1, turn(0, 0))
    router.load[first.url] = 10
    assert router.choose(1, turn(0, 0)) is first
    assert router.choose(1, turn(1, 0)).url == B, "another group's goes by load"


def test_the_rollouts_of_a_group_open_on_one_server_and_each_goes_on_where_it_was(router):
    opened = [router.choose(1, turn(0, number)).url for number in range(4)]
    assert opened == [A] * 4
    router.load |= {A: 40, B: 0, C: 0}  # too much: the mean is 13
    assert router.choose(1, turn(0, 2)).url == B
    router.load |= {A: 0, B: 9, C: 0}
    assert router.choose(1, turn(0, 2)).url == B, "its prefix is there now"
    assert router.choose(1, turn(0, 3)).url == A


@pytest.mark.parametrize(
    ("here", "elsewhere", "stays"),
    [
        (15, 0, True),  # 16 with this one: few
        (16, 0, False),  # 17, and 1.25 times the mean is 7
        (141, 100, True),  # 142 with this one, and 1.25 * 342 / 3 = 142.5
        (142, 100, False),  # 143, and 142.9
    ],
)
def test_it_leaves_for_a_server_that_is_a_quarter_above_the_mean_and_has_more_than_a_few(
    router, here, elsewhere, stays
):
    router.choose(1, turn(0, 0))
    router.load |= {A: here, B: elsewhere, C: elsewhere}
    assert (router.choose(1, turn(0, 0)).url == A) is stays


def test_after_an_update_no_cache_holds_a_prefix(router):
    router.choose(1, turn(0, 0))
    router.load[A] = 5
    router.servers[0].version = router.servers[1].version = router.servers[2].version = 1
    assert router.choose(1, turn(0, 0)).url == B
    router.load[B] = 9
    assert router.choose(1, turn(0, 0)).url == B


def test_servers_that_are_away_or_load_get_nothing_and_those_that_failed_come_last(router):
    a, b, c = router.servers
    router.choose(1, turn(0, 0))
    a.away = True
    assert router.choose(1, turn(0, 0)) is b
    a.away, b.loading = False, True
    c.failed()
    router.load[A] = 99
    assert router.choose(1, turn(0, 0)) is a and router.choose() is a
    a.loading = True
    assert router.choose() is c
    c.away = True
    assert router.choose(1, turn(0, 0)) is None
