"""A process group of the trainer and two workers: what it carries, and how waits end when a peer does not come."""

import multiprocessing
import os
import time

import pytest
import torch

from prl.wire.peers import Peers, TransferFailed, called_off

CPU = torch.device("cpu")
SENT = 5


def peer(store, rank, world_size, timeout_s, results, ends_after):
    """Receive tensors, or send them; a peer that `ends_after` some of them dies then."""
    torch.set_num_threads(1)
    got, began = [], time.monotonic()
    try:
        peers = Peers(store, rank, world_size, device=CPU, timeout_s=timeout_s)
        for number in range(SENT):
            if number == ends_after.get(rank):
                os._exit(9)
            values = torch.arange(3.0) + number if rank == 0 else torch.zeros(3)
            peers.wait(peers.broadcast(values))
            got.append(values.tolist())
        peers.close()
        results.put((rank, got, None, 0.0))
    except TransferFailed as error:
        results.put((rank, got, str(error), time.monotonic() - began))


@pytest.fixture
def met(tmp_path, monkeypatch):
    """`met(ranks, timeout_s, ends_after, meanwhile)`: what each of these peers of three got, and how that ended."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["prl.wire.peers", "torch"])
    started = []

    def run(ranks, timeout_s=60.0, ends_after=None, meanwhile=lambda store: None):
        results, store = context.Queue(), str(tmp_path / "peers-1")
        for rank in ranks:
            given = (store, rank, 3, timeout_s, results, ends_after or {})
            started.append(context.Process(target=peer, args=given))
            started[-1].start()
        meanwhile(store)
        found = [results.get(timeout=90) for rank in ranks if rank not in (ends_after or {})]
        return {rank: (got, error, seconds) for rank, got, error, seconds in found}

    yield run
    for process in started:
        process.kill()
        process.join()


def test_all_members_get_what_the_first_one_sends(met):
    sent = [[0.0 + n, 1.0 + n, 2.0 + n] for n in range(SENT)]
    assert met(range(3)) == dict.fromkeys(range(3), (sent, None, 0.0))


@pytest.mark.parametrize("dies", [0, 2])
def test_where_one_dies_in_the_middle_the_others_hear_of_it_at_once(met, dies):
    found = met(range(3), ends_after={dies: 2})
    for rank, (got, error, seconds) in found.items():
        assert len(got) <= 3 and "weights did not pass" in error, (rank, got, error)
        assert seconds < 30, "long before the deadline"


def test_a_member_that_does_not_come_is_named_at_the_deadline(met):
    found = met([0, 1], timeout_s=2.0)
    assert len(found) == 2
    for _, error, seconds in found.values():
        assert error == "waited 2 s to meet: peer 2 of 3 has not come" and 2 <= seconds < 20


def test_a_transfer_that_is_called_off_ends_the_waits_for_it(met):
    found = met([0, 1], meanwhile=lambda store: (time.sleep(1), called_off(store).touch()))
    for _, error, seconds in found.values():
        assert "called off" in error and seconds < 30


def test_a_folder_that_is_not_there_is_a_failed_transfer(tmp_path):
    with pytest.raises(TransferFailed, match="no such folder"):
        Peers(str(tmp_path / "nowhere" / "group"), 0, 1, device=CPU, timeout_s=1)
