"""What passes between orchestrator and ranks, over connections on this machine, some of which are cut."""

import os
import random
import socket
import time

import msgspec
import pytest
import zmq
from sides import Cutter, until

from prl.errors import PrlError
from prl.wire import curve, session
from prl.wire.curve import Invitation
from prl.wire.session import Envelope, Hello, OrchestratorEnd, RankEnd


@pytest.fixture
def ends():
    """`ends(ranks)`: the orchestrator's end and a function that makes a rank's, by rank and what it is invited with."""
    made = []

    def begin(ranks=1):
        made.append(orchestrator := OrchestratorEnd("127.0.0.1", ranks))

        def join(rank=0, **other):
            made.append(end := RankEnd(msgspec.structs.replace(orchestrator.invitation, **other), rank))
            return end

        return orchestrator, join

    yield begin
    for end in made:
        end.close()


def collected(end, others, count):
    """The next `count` messages that `end` has, while the others look, too."""
    found = []

    def more():
        for other in others:
            assert other.received() == []
        found.extend(end.received())
        return len(found) >= count

    until(more)
    return found


def met(orchestrator, *ranks):
    """Return when all are connected."""

    def answered():
        return all([end.received() == [] for end in (orchestrator, *ranks)] + [rank.answered for rank in ranks])

    until(answered)


@pytest.fixture
def cutter(ends, monkeypatch):
    """The orchestrator's end, a rank's that reaches it by way of the cutter, and that."""
    monkeypatch.setattr(session, "RETRY_S", 0.02)
    orchestrator, join = ends()
    cutter = Cutter(int(orchestrator.invitation.address.rpartition(":")[2]))
    yield orchestrator, join(address=f"tcp://127.0.0.1:{cutter.port}"), cutter
    cutter.close()


# --- order ------------------------------------------------------------------------------------------------------------


def test_each_rank_has_its_own_messages_in_order_and_says_whose_it_is(ends):
    orchestrator, join = ends(2)
    for number in range(50):
        for rank in (0, 1):
            orchestrator.post(b"%d for %d" % (number, rank), rank)
    ranks = [join(0), join(1)]  # what is sent before they are there waits for them
    for number in range(50):
        ranks[1].post(b"%d" % number)
    found = [[], []]
    heard = []

    def all_there():
        heard.extend(orchestrator.received())
        for rank, end in enumerate(ranks):
            found[rank].extend(content for _, content in end.received())
        return len(heard) == 50 and [len(each) for each in found] == [50, 50]

    until(all_there)
    assert found == [[b"%d for %d" % (number, rank) for number in range(50)] for rank in (0, 1)]
    assert heard == [("rank 1 of the trainer", b"%d" % number) for number in range(50)]


def test_what_the_other_side_has_is_kept_no_longer(ends):
    orchestrator, join = ends()
    rank = join()
    met(orchestrator, rank)
    orchestrator.post(b"a", 0)
    rank.post(b"b")

    def nothing_is_kept():
        orchestrator.received(), rank.received()
        return not orchestrator.sessions[0].kept and not rank.session.kept

    until(nothing_is_kept)


def test_a_message_may_be_larger_than_what_ranks_may_send(ends):
    orchestrator, join = ends()
    rank, large = join(), os.urandom(1 << 20) * 80
    assert len(large) > session.LARGEST
    orchestrator.post(large, 0)
    [(_, found)] = collected(rank, [orchestrator], 1)
    assert found == large


# --- connections that end ---------------------------------------------------------------------------------------------


def test_cut_connections_lose_nothing_and_repeat_nothing(cutter):
    """Both sides send all the time, much more than the kernel holds; the connection is cut at any byte."""
    orchestrator, rank, between = cutter
    draw, sent = random.Random(0), 400
    down, up = [], []
    for number in range(sent):
        orchestrator.post(number.to_bytes(4, "big") + bytes(draw.randrange(20_000)), 0)
        rank.post(number.to_bytes(4, "big") + bytes(draw.randrange(20_000)))
        if number % 50 == 20:
            between.cut()
        for end, found in ((orchestrator, up), (rank, down)):
            found.extend(int.from_bytes(content[:4], "big") for _, content in end.received())
        time.sleep(0.002)

    def all_there():
        for end, found in ((orchestrator, up), (rank, down)):
            found.extend(int.from_bytes(content[:4], "big") for _, content in end.received())
        return len(up) >= sent and len(down) >= sent

    until(all_there)
    assert up == down == list(range(sent))
    assert between.cuts >= 3


def test_a_rank_that_never_reaches_the_orchestrator_says_so_at_a_deadline(ends, monkeypatch):
    monkeypatch.setattr(session, "ANSWER_S", 0.3)
    monkeypatch.setattr(session, "RETRY_S", 0.02)
    _, join = ends()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        rank, began = join(address=f"tcp://127.0.0.1:{closed.getsockname()[1]}"), time.monotonic()
        message = r"the orchestrator at tcp://127\.0\.0\.1:\d+ did not answer rank 0 within 0\.3 s"
        with pytest.raises(PrlError, match=message):
            until(lambda: rank.received(), 10)
    assert 0.2 < time.monotonic() - began < 5


def test_a_connection_that_ends_is_said_and_a_rank_that_had_an_answer_waits_for_another(cutter, capfd):
    orchestrator, rank, between = cutter
    orchestrator.post(b"a", 0)
    collected(rank, [orchestrator], 1)
    assert rank.give_up_at == float("inf")
    between.close()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert rank.received() == []
        time.sleep(0.01)
    assert capfd.readouterr().err.count("has ended, and is made again") == 1


def test_a_network_that_holds_everything_for_a_while_costs_nothing(ends, monkeypatch, capfd):
    """No connection ends by itself: each side misses the heartbeats of the other."""
    monkeypatch.setattr(curve, "SILENT_S", 0.6)
    monkeypatch.setattr(session, "RETRY_S", 0.02)
    orchestrator, join = ends()
    between = Cutter(int(orchestrator.invitation.address.rpartition(":")[2]))
    rank = join(address=f"tcp://127.0.0.1:{between.port}")
    try:
        met(orchestrator, rank)
        between.flows.clear()
        orchestrator.post(b"down", 0)
        rank.post(b"up")
        until(lambda: rank.received() or orchestrator.received() or not rank.answered, 20)
        between.flows.set()
        found = []
        until(lambda: found.extend(rank.received() + orchestrator.received()) or len(found) == 2)
        assert sorted(found) == [("rank 0 of the trainer", b"up"), ("the orchestrator", b"down")]
        assert "has ended, and is made again" in capfd.readouterr().err
    finally:
        between.close()


# --- large messages and slow networks ---------------------------------------------------------------------------------


@pytest.fixture
def slow(ends, monkeypatch):
    """As `cutter`, with 100 KB/s either way, pieces of 4 KB, and sides that count as gone after 0.8 s."""
    monkeypatch.setattr(session, "PIECE", 4096)
    monkeypatch.setattr(session, "RETRY_S", 0.02)
    monkeypatch.setattr(curve, "SILENT_S", 0.8)
    orchestrator, join = ends()
    between = Cutter(int(orchestrator.invitation.address.rpartition(":")[2]), rate=100_000)
    yield orchestrator, join(address=f"tcp://127.0.0.1:{between.port}"), between
    between.close()


def test_a_message_may_take_longer_to_arrive_than_a_side_may_be_silent(slow, capfd):
    orchestrator, rank, _ = slow
    began, down, up = time.monotonic(), os.urandom(200_000), os.urandom(190_000)
    orchestrator.post(down, 0)
    rank.post(up)
    found = []
    until(lambda: found.extend(rank.received() + orchestrator.received()) or len(found) == 2)
    assert sorted(found) == [("rank 0 of the trainer", up), ("the orchestrator", down)]
    assert time.monotonic() - began > 2 * curve.SILENT_S, "the network was slow"
    assert "has ended" not in capfd.readouterr().err


def test_pieces_that_have_arrived_stay_when_the_connection_ends_and_are_kept_no_longer(slow):
    """No connection lasts for more than a few of them."""
    orchestrator, rank, between = slow
    message, found, cut_at = os.urandom(150_000), [], 5
    orchestrator.post(message, 0)
    pieces, seen = len(orchestrator.sessions[0].kept), [0]
    while not found:
        found = rank.received()
        assert orchestrator.received() == []
        seen.append(rank.session.received)
        if seen[-1] >= cut_at:
            assert len(orchestrator.sessions[0].kept) < pieces, "a part of it was acknowledged"
            between.cut()
            cut_at = seen[-1] + 5
        time.sleep(0.002)
    assert found == [("the orchestrator", message)]
    assert between.cuts >= 4 and seen == sorted(seen) and seen[-1] == pieces == 37


def test_a_message_of_a_rank_that_is_too_large_is_refused_by_the_rank_in_words(ends, monkeypatch):
    monkeypatch.setattr(session, "LARGEST", 10_000)
    orchestrator, join = ends()
    rank = join()
    with pytest.raises(
        PrlError, match=r"rank 0 has a message of 10001 bytes for the orchestrator, which takes 10000: "
    ):
        rank.post(bytes(10_001))
    rank.post(bytes(10_000))
    assert collected(orchestrator, [rank], 1) == [("rank 0 of the trainer", bytes(10_000))]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8192, 9000])
def test_a_message_of_any_size_arrives_as_it_was(ends, monkeypatch, size):
    monkeypatch.setattr(session, "PIECE", 4096)
    orchestrator, join = ends()
    rank, message = join(), os.urandom(size)
    orchestrator.post(message, 0)
    orchestrator.post(b"next", 0)
    assert [content for _, content in collected(rank, [orchestrator], 2)] == [message, b"next"]


# --- who is not heard -------------------------------------------------------------------------------------------------


def silent(orchestrator, join, monkeypatch, **other):
    """Whether the orchestrator neither hears nor answers a rank that is invited with something else."""
    monkeypatch.setattr(session, "ANSWER_S", 0.5)
    rank = join(**other)
    orchestrator.post(b"secret", 0)
    rank.post(b"wrong")
    with pytest.raises(PrlError, match="did not answer"):
        while True:
            assert orchestrator.received() == [] and rank.received() == []
            time.sleep(0.005)
    return not orchestrator.peers


def test_a_wrong_token_is_not_heard_and_told_nothing(ends, monkeypatch, caplog):
    orchestrator, join = ends()
    assert silent(orchestrator, join, monkeypatch, token="f" * 48)
    assert "127.0.0.1 is not heard: its token is not that of this run" in caplog.text
    good = join()
    orchestrator.post(b"hello", 0)
    assert [content for _, content in collected(good, [orchestrator], 2)] == [b"secret", b"hello"]


def test_a_wrong_key_does_not_even_connect(ends, monkeypatch, caplog):
    """As of a rank of an earlier run, and of whoever listens at an address that another run had."""
    orchestrator, join = ends()
    assert silent(orchestrator, join, monkeypatch, key=zmq.curve_keypair()[0].decode())
    assert caplog.text == ""


@pytest.mark.parametrize(("rank", "reason"), [(0, "rank 0 has connected already"), (7, "there is no rank 7")])
def test_another_process_that_says_it_were_a_rank_is_not_heard(ends, monkeypatch, caplog, rank, reason):
    """Also with the token: it would get what is meant for the other, or have it believed to have what it has not."""
    orchestrator, join = ends()
    first = join()
    met(orchestrator, first)
    monkeypatch.setattr(session, "ANSWER_S", 0.5)
    stale = join(rank)
    orchestrator.post(b"a", 0)
    stale.post(b"wrong")
    with pytest.raises(PrlError, match="did not answer"):
        while True:
            assert orchestrator.received() == [] and stale.received() == []
            time.sleep(0.005)
    assert reason in caplog.text
    assert collected(first, [orchestrator], 1) == [("the orchestrator", b"a")]


def test_garbage_on_the_port_changes_nothing(ends):
    orchestrator, join = ends()
    port = int(orchestrator.invitation.address.rpartition(":")[2])
    rank, draw = join(), random.Random(1)
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE",
        draw.randbytes(9999),
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(data)
            orchestrator.post(data, 0)
            assert collected(rank, [orchestrator], 1) == [("the orchestrator", data)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(Envelope(1, 0, b"x")),
        msgspec.json.encode(Hello("t", 0, "s", 0)),
        msgspec.msgpack.encode({"type": "Hello", "token": "t", "rank": "0", "session": "s", "received": 0}),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_greeting_is_dropped(ends, data):
    """From somebody who has the key."""
    orchestrator, join = ends()
    stranger = zmq.Context()
    try:
        end = stranger.socket(zmq.DEALER)
        end.curve_serverkey = orchestrator.invitation.key.encode()
        end.curve_publickey, end.curve_secretkey = zmq.curve_keypair()
        end.connect(orchestrator.invitation.address)
        end.send(data)
        rank = join()
        orchestrator.post(b"a", 0)
        assert collected(rank, [orchestrator], 1) == [("the orchestrator", b"a")]
        assert not end.poll(100) and len(orchestrator.peers) == 1
    finally:
        stranger.destroy(0)


def test_a_huge_message_costs_its_sender_the_connection(ends, monkeypatch):
    """Of somebody who has the key; a rank's own come in pieces."""
    monkeypatch.setattr(session, "FRAME", 10_000)
    orchestrator, join = ends(2)
    rank, other = join(0), join(1)
    met(orchestrator, rank, other)
    socket_of_it = other.socket
    other.socket.send(bytes(20_000))
    until(lambda: orchestrator.received() or other.received() or other.socket is not socket_of_it)
    rank.post(b"a")
    assert collected(orchestrator, [rank], 1) == [("rank 0 of the trainer", b"a")]


@pytest.mark.parametrize("data", [b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode([-1, "x", b""])])
def test_a_rank_that_sends_what_it_may_not_ends_the_run(ends, data):
    orchestrator, join = ends()
    rank = join()
    met(orchestrator, rank)
    rank.socket.send(data)
    with pytest.raises(PrlError, match="rank 0 of the trainer sent what is no message"):
        until(lambda: orchestrator.received(), 10)


def test_a_rank_that_never_ends_a_message_is_not_listened_to_without_bound(ends, monkeypatch):
    monkeypatch.setattr(session, "LARGEST", 10_000)
    monkeypatch.setattr(session, "PIECE", 1000)
    orchestrator, join = ends()
    rank = join()
    met(orchestrator, rank)
    for _ in range(100):
        rank.session.posted += 1
        rank.session.kept.append((rank.session.posted, bytes(1000), True))
    rank.received()
    with pytest.raises(PrlError, match="rank 0 of the trainer sent a message of more than 10000 bytes"):
        until(lambda: orchestrator.received(), 10)
    assert len(orchestrator.sessions[0].begun) <= 11_000


def test_a_rank_that_sends_without_an_end_does_not_hold_the_orchestrator(ends, monkeypatch):
    monkeypatch.setattr(session, "AT_ONCE", 10)
    orchestrator, join = ends()
    rank = join()
    met(orchestrator, rank)
    for number in range(100):
        rank.post(b"%d" % number)
    time.sleep(0.1)  # all of them are there
    looks = []
    until(lambda: looks.append(orchestrator.received()) or sum(map(len, looks)) == 100)
    assert max(map(len, looks)) == 10
    assert [content for look in looks for _, content in look] == [b"%d" % number for number in range(100)]


def test_a_piece_that_is_missing_is_noticed(ends):
    orchestrator, join = ends()
    rank = join()
    met(orchestrator, rank)
    rank.session.posted = 1
    rank.post(b"the second")
    with pytest.raises(PrlError, match="piece 1 of what rank 0 of the trainer sent is missing"):
        until(lambda: orchestrator.received(), 10)


@pytest.mark.parametrize("invitation", [Invitation("nowhere", "k" * 40, "t"), Invitation("tcp://h:1", "short", "t")])
def test_what_is_no_address_or_key_is_refused(invitation):
    with pytest.raises(PrlError, match=r"(nowhere|tcp://h:1) cannot be connected to"):
        RankEnd(invitation, 0)


def test_an_address_that_is_not_this_machines_is_refused():
    with pytest.raises(PrlError, match=r"the orchestrator cannot listen at 192\.0\.2\.1 for the trainer's ranks"):
        OrchestratorEnd("192.0.2.1", 1)
