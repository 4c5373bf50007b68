"""The trainer and two workers as peers: what passes to the bit, and how waits end when a peer does not come.

Each is a process. They are on one machine, so they share memory, unless the sender's socket cannot be reached.
"""

import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path

import forking
import pytest
import torch

from prl.wire import meeting, shared_buffers
from prl.wire.buckets import TensorSpec, buckets, of_two, view_of
from prl.wire.peers import TransferFailed, called_off
from prl.wire.shared_memory import Link, Shared

CPU = torch.device("cpu")
SPECS = [
    TensorSpec("a", "float32", (3,)),
    TensorSpec("b", "bfloat16", (5, 7)),
    TensorSpec("c", "bfloat16", (900,)),
    TensorSpec("larger than a bucket", "float32", (30, 50)),
    TensorSpec("d", "float32", (500,)),
    TensorSpec("e", "bfloat16", ()),
    TensorSpec("also larger", "bfloat16", (2000,)),
    TensorSpec("empty, in a bucket of its own", "float32", (0, 4)),
]
CUT = list(buckets(SPECS, 2048))
VERSIONS = 3
"""That pass one after the other."""
WAYS = ["memory", "group"]


def numbers(version, number):
    """All bytes of a bucket; NaNs with their payloads are among its numbers."""
    generator = torch.Generator().manual_seed(1000 * version + number)
    return torch.randint(256, (CUT[number][-1].stop,), dtype=torch.uint8, generator=generator)


def mapped():
    """What may be done with each file of buckets that this process has."""
    return re.findall(r"^\S+ (\S+) .*memfd:prl-buckets", Path("/proc/self/maps").read_text(), re.MULTILINE)


def sends(peers, version, ends_after):
    """As the trainer does: a bucket is packed while the one before is under way."""
    memory, under_way = peers.buffers(CUT), []
    for number, bucket in enumerate(CUT):
        if number == ends_after:
            os._exit(9)
        packed = memory[number % 2][: bucket[-1].stop]
        packed.copy_(numbers(version, number))
        if under_way:
            peers.wait(under_way.pop())
        under_way.append(peers.broadcast(packed))
    peers.wait(under_way.pop())


def receives(peers, version, ends_after, slow_s):
    """As a worker does: the next bucket may come while one is loaded. Counts the tensors that are right."""
    memory, coming, right = peers.buffers(CUT), [], 0
    for number in range(len(CUT) + 1):
        if number < len(CUT):
            packed = memory[number % 2][: CUT[number][-1].stop]
            coming.append((number, packed, peers.broadcast(packed)))
        if number == 0:
            continue
        this, packed, work = coming.pop(0)
        peers.wait(work)
        if this == ends_after:
            os._exit(9)
        time.sleep(slow_s)  # the sender could go on meanwhile
        sent = numbers(version, this)
        for place in CUT[this]:
            got, expected = view_of(packed, place), view_of(sent, place)
            assert got.shape == place.spec.shape and got.dtype == expected.dtype
            right += torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
        peers.let_go(work)
    return right


def peer(
    store, rank, results, temporary, *, way="memory", timeout_s=60.0, ends_after=None, far=(), other=(), slow_s=0.01
):
    """A peer of three; one that `ends_after` a bucket of the second version dies then."""
    torch.set_num_threads(1)
    tempfile.tempdir, peers = str(temporary), None
    if rank in other:
        del CUT[0]
    if way == "group" and rank == 0:
        tempfile.tempdir = str(temporary / ("x" * 100))  # no socket has so long a path
        os.makedirs(tempfile.tempdir, exist_ok=True)
    if far == (rank, "machine"):
        meeting.link_to = lambda *_: None
    if far == (rank, "device"):
        meeting.place_of = lambda _: "GPU-1"
    if (ends_after or {}).get(rank) == "met":
        meeting.Group = lambda *_, **__: os._exit(9)
    told, began = {"rank": rank, "error": None, "maps": set(), "right": []}, time.monotonic()
    try:
        peers = meeting.meet(store, rank, 3, device=CPU, timeout_s=timeout_s)
        for version in range(VERSIONS):
            dies = (ends_after or {}).get(rank) if version == 1 else None
            if rank == 0:
                sends(peers, version, dies)
            else:
                told["right"].append(receives(peers, version, dies, slow_s * (rank == 2)))
            told["maps"] |= set(mapped())
        peers.close()
    except TransferFailed as error:
        told |= {"error": str(error), "seconds": time.monotonic() - began}
        if peers is not None:
            peers.close()
    told["left"] = mapped()
    results.put(told)


@pytest.fixture
def met(tmp_path, monkeypatch):
    """`met(ranks, meanwhile, **options)`: what each of these peers of three tells."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    temporary = Path(tempfile.mkdtemp(prefix="p-"))
    context = forking.ranks()
    started = []

    def run(ranks, meanwhile=lambda store: None, **options):
        results, store = context.Queue(), str(tmp_path / f"peers-{len(started)}")
        for rank in ranks:
            started.append(context.Process(target=peer, args=(store, rank, results, temporary), kwargs=options))
            started[-1].start()
        meanwhile(store)
        dying = options.get("ends_after") or {}
        found = [results.get(timeout=90) for rank in ranks if rank not in dying]
        assert not any(told["left"] for told in found), "buffers are left"
        assert not list(temporary.rglob("prl-*")), "sockets are left"
        return {told["rank"]: told for told in found}

    yield run
    for process in started:
        process.kill()
        process.join()
    shutil.rmtree(temporary)


@pytest.mark.parametrize("way", WAYS)
def test_all_peers_get_what_the_first_one_sends_to_the_bit(met, way):
    """Buckets of one tensor and of several, an empty one; a receiver that is slow, and one that is not."""
    assert [len(bucket) for bucket in CUT] == [3, 1, 2, 1, 1] and CUT[-1][-1].stop == 0 and max(of_two(CUT)) > 2048
    found = met(range(3), way=way)
    assert [told["error"] for told in found.values()] == [None] * 3
    for rank in (1, 2):
        assert found[rank]["right"] == [len(SPECS)] * VERSIONS
    maps = {"memory": [{"rw-s"}, {"r--s"}, {"r--s"}], "group": [set()] * 3}
    assert [found[rank]["maps"] for rank in range(3)] == maps[way]


@pytest.mark.parametrize("what", ["machine", "device"])
def test_where_one_peer_is_elsewhere_none_shares_memory(met, what):
    """The socket of another machine cannot be reached; a GPU has a name that all machines know it by."""
    found = met(range(3), far=(2, what))
    assert [told["error"] for told in found.values()] == [None] * 3
    assert found[1]["right"] == found[2]["right"] == [len(SPECS)] * VERSIONS
    assert [told["maps"] for told in found.values()] == [set()] * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dies", [0, 2])
def test_where_one_dies_in_the_middle_the_others_hear_of_it_at_once(met, dies, way):
    found = met(range(3), way=way, ends_after={dies: 2})
    assert len(found) == 2
    for told in found.values():
        assert told["seconds"] < 30, "long before the deadline"
        assert "weights did not pass" in told["error"]
        if way == "memory":
            assert told["error"] == f"weights did not pass: peer {0 if told['rank'] else dies} of 3 is gone"


def test_buffers_that_are_not_as_announced_are_refused(met):
    """A worker that was told of other weights."""
    found = met(range(3), other=(2,))
    sent, needed = of_two(CUT), of_two(CUT[1:])
    assert found[2]["error"] == f"the peers have buffers of {sent} bytes, and the weights need {needed}"
    assert found[0]["error"] == "weights did not pass: peer 2 of 3 is gone"


def test_a_bucket_is_announced_once_the_device_is_done_with_it(monkeypatch):
    """By both sides: what a GPU is still to do is not seen by another process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heard, options = [], {"store": "x", "device": CPU, "timeout_s": 1.0}
    theirs.setblocking(False)

    def settle(device):
        with pytest.raises(BlockingIOError):
            theirs.recv(9)
        heard.append(device)

    monkeypatch.setattr(shared_buffers, "settle", settle)
    for sends, act in ((True, lambda peers: peers.broadcast(None)), (False, lambda peers: peers.let_go(1))):
        act(Shared([Link(ours, "peer")], sends=sends, **options))
        assert theirs.recv(9) == b"." and heard == [CPU]
        heard.clear()
    ours.close(), theirs.close()


@pytest.mark.parametrize("way", WAYS)
def test_after_a_transfer_that_is_called_off_in_the_middle_another_one_passes(met, way):
    """The third peer is slow, and has not loaded all when the first hears of it."""
    slow = {"way": way, "slow_s": 2.0, "timeout_s": 30.0}
    found = met(range(3), meanwhile=lambda store: (time.sleep(4), called_off(store).touch()), **slow)
    assert any("called off" in (told["error"] or "") for told in found.values())
    assert all(told["error"] and told["seconds"] < 25 for told in found.values())
    again = met(range(3), way=way)
    assert again[1]["right"] == again[2]["right"] == [len(SPECS)] * VERSIONS


def test_a_member_that_does_not_come_is_named_at_the_deadline(met):
    found = met([0, 1], timeout_s=2.0)
    assert len(found) == 2
    for told in found.values():
        assert told["error"] == "waited 2 s to meet: peer 2 of 3 has not come" and 2 <= told["seconds"] < 20


def test_a_member_that_does_not_connect_is_noticed_at_the_deadline(met):
    """It has come, and is gone before torch connects it with the others, which torch waits for."""
    found = met(range(3), way="group", timeout_s=2.0, ends_after={2: "met"})
    assert len(found) == 2
    for told in found.values():
        assert told["error"] == "waited 2 s for all peers to connect: a peer is silent" and 2 <= told["seconds"] < 20


def test_peers_that_connect_stop_when_the_transfer_is_called_off(met):
    off = {"meanwhile": lambda store: (time.sleep(4), called_off(store).touch()), "ends_after": {2: "met"}}
    for told in met(range(3), way="group", **off).values():
        assert "called off" in told["error"] and told["seconds"] < 30


def test_a_transfer_that_is_called_off_ends_the_waits_for_it(met):
    found = met([0, 1], meanwhile=lambda store: (time.sleep(1), called_off(store).touch()))
    for told in found.values():
        assert "called off" in told["error"] and told["seconds"] < 30


def test_a_folder_that_is_not_there_is_a_failed_transfer(tmp_path):
    with pytest.raises(TransferFailed, match="no such folder"):
        meeting.meet(str(tmp_path / "nowhere" / "group"), 0, 1, device=CPU, timeout_s=1)
