"""The trainer's side of transfers: what it sends, and when it trains on."""

import os
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import forking
import pytest
import sharded
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sides import Sides, until

from prl.errors import PrlError
from prl.trainer import transfer
from prl.trainer.lora import adapters_of, add_adapters, weights_of
from prl.trainer.model import save_weights
from prl.trainer.sharding import make_mesh, shard
from prl.trainer.transfer import Sender, bucketed, specs_of
from prl.wire.buckets import buckets, of_two, view_of
from prl.wire.curve import Invitation
from prl.wire.events import Lane
from prl.wire.exchange import Answer, Exchange, FromOrchestrator, Layout, Loaded, Order
from prl.wire.meeting import meet
from prl.wire.process_group import Group, deadline_of
from prl.wire.session import RankEnd
from prl.wire.shared_memory import Shared
from prl.wire.transfers import Transfers

CPU = torch.device("cpu")


def sent(model, dtype, limit):
    """Name and tensor of all that is sent, in its order, and the buckets' sizes."""
    found, sizes = [], []
    cut = list(buckets(specs_of(model, dtype), limit))
    memory = [torch.empty(size, dtype=torch.uint8) for size in of_two(cut)]
    for packed, bucket in zip(bucketed(model, dtype, cut, memory), cut, strict=True):
        sizes.append(len(packed))
        found += [(place.spec.name, view_of(packed, place).clone()) for place in bucket]  # used again
    return found, sizes


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_sent_is_what_would_be_written_in_the_announced_order(tiny, tmp_path, dtype, adapters):
    """By way of safetensors: names, number formats, shapes and every bit; the tied head is in neither."""
    limit = 100_000
    if adapters:
        plain = dict(weights_of(tiny))["model.layers.1.mlp.up_proj.weight"].clone()
        add_adapters(tiny, {"rank": 2, "alpha": 8.0, "target_modules": None}, "base")
        for matrix in adapters_of(tiny).values():
            torch.nn.init.normal_(matrix)
    save_weights(tiny, tmp_path, dtype)
    written = load_file(tmp_path / "model.safetensors")
    found, sizes = sent(tiny, dtype, limit)
    announced = [(spec.name, spec.dtype, spec.shape) for spec in specs_of(tiny, dtype)]
    assert [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in found] == announced
    assert {name for name, _ in found} == written.keys() and "lm_head.weight" not in written
    assert all(torch.equal(tensor, written[name]) for name, tensor in found)
    if adapters:
        assert not torch.equal(written["model.layers.1.mlp.up_proj.weight"], plain.to(dtype))
    largest = max(tensor.nbytes for tensor in written.values())
    assert len(sizes) > 5 and max(sizes) <= max(limit, largest)


def test_a_number_that_is_not_finite_is_not_sent_and_its_tensor_named(tiny):
    with torch.no_grad():
        tiny.model.layers[2].mlp.up_proj.weight[3, 4] = 1e6  # finite, but not in float16
    with pytest.raises(PrlError, match=r"1 numbers of model\.layers\.2\.mlp\.up_proj\.weight are .* in float16"):
        sent(tiny, torch.float16, 2**20)
    assert sent(tiny, torch.bfloat16, 2**20)


def rank_main(folder: Path, rank: int, ranks: int, shard_size: int, invitation: Invitation):
    """A rank of a sharded model that takes part in one transfer, and says what it did then."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    deadline = timedelta(seconds=777)
    where = {"init_method": f"file://{folder}/ranks", "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", **where, timeout=deadline)
    model, mesh = sharded.make_model(tied=True, meta=rank > 0), make_mesh(CPU, shard_size)
    assert all(deadline_of(group, CPU) == deadline for group in mesh.get_all_groups())
    shard(model, mesh, CPU, half=False, offload=False)
    transfers = Transfers(folder / "transfer", 4096)
    if rank == 0:
        transfers.exchange = Exchange(RankEnd(invitation, 0), FromOrchestrator)
    sender = Sender(transfers, model, torch.float32, CPU, Lane("trainer"))
    sender.begin(3, 60)
    dist.barrier()
    if rank == 0:
        (folder / "ready").touch()
    sender.version = 4
    sender.until(lambda: True, 60, "nothing came")
    (folder / f"trains-{rank}").touch()
    sender.until(lambda: transfers.ended, 60, "no end", last=True)
    save_weights(model, folder / "saved" if rank == 0 else None, torch.float32)
    dist.destroy_process_group()


def received(transfers, number, limit):
    """What the only worker gets of the transfer with that number."""
    peers = meet(transfers.store(number), 1, 2, device=CPU, timeout_s=60)
    found, cut = {}, list(buckets(until(lambda: transfers.read(Layout)).tensors, limit))
    memory = peers.buffers(cut)
    for place, bucket in enumerate(cut):
        packed = memory[place % 2][: bucket[-1].stop]
        peers.wait(work := peers.broadcast(packed))
        found |= {place.spec.name: view_of(packed, place).clone() for place in bucket}
        peers.let_go(work)
    peers.close()
    return found


@pytest.mark.parametrize(("ranks", "shard_size"), [(2, 2), (2, 1)])
def test_ranks_that_share_parameters_send_all_of_them_and_train_on_together(tmp_path, monkeypatch, ranks, shard_size):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sides = Sides(tmp_path / "transfer", 4096)
    transfers, context = sides.ours, forking.ranks()
    given = [(tmp_path, rank, ranks, shard_size, sides.invitation) for rank in range(ranks)]
    processes = [context.Process(target=rank_main, args=each) for each in given]
    try:
        for process in processes:
            process.start()
        until(lambda: transfers.read(Layout) and (tmp_path / "ready").exists(), 60)
        transfers.write(Order(1, transfers.store(1), 2, 60.0))
        found = received(transfers, 1, 4096)
        assert transfers.read(Answer) == Answer(1, 4)
        time.sleep(0.3)
        assert not list(tmp_path.glob("trains-*")), "the engines may not have loaded it yet"
        transfers.write(Loaded(4))
        until(lambda: len(list(tmp_path.glob("trains-*"))) == ranks, 60)
        transfers.end()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
        sides.close()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)


def silent_main(folder: Path, rank: int, dies: bool):
    """The first rank of two ends without a word, or says none in time; the other says what became of it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    transfer.BEHIND_S = 60.0 if dies else 0.5
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    sender = Sender(Transfers(folder, 4096), sharded.make_model(tied=True), torch.float32, CPU, Lane("trainer"))
    sender._group = dist.new_group(timeout=timedelta(seconds=transfer.BEHIND_S), backend="gloo")
    if rank == 0:
        until((folder / "met").exists, 50)
        time.sleep(0 if dies else 5)
        os._exit(0)
    (folder / "met").touch()
    with pytest.raises(PrlError, match="the trainer's first rank did not say what follows: ") as error:
        sender.until(lambda: True, 0.0, "")
    (folder / "said").write_text(str(error.value))
    os._exit(0)


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_the_first_one_tells_nothing_says_so(tmp_path, dies):
    began, context = time.monotonic(), forking.ranks()
    processes = [context.Process(target=silent_main, args=(tmp_path, rank, dies)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        processes[1].join(50)
        assert processes[1].exitcode == 0 and (tmp_path / "said").exists() and time.monotonic() - began < 50
    finally:
        for process in processes:
            process.kill()


@pytest.fixture
def sides(tmp_path):
    with Sides(tmp_path / "transfer", 2**20) as both:
        yield both


@pytest.fixture
def sender(tiny, sides):
    """Of a trainer that has made version 1, while the engines have version 0."""
    sender = Sender(sides.theirs(), tiny, torch.float32, CPU, Lane("trainer"))
    sender.begin(0, 60)
    sender.version = 1
    return sender


def test_a_version_waits_until_the_engines_have_it_or_the_orchestrator_does_not_mind(sender, sides):
    transfers = sides.ours
    with pytest.raises(PrlError, match=r"the engines did not take policy version 1 within 0\.05 s"):
        sender.until(lambda: True, 0.05, "no batch")
    with transfers.passing():
        sender.until(lambda: True, 5, "no batch")
        with pytest.raises(PrlError, match=r"no batch within 0\.05 s"):
            sender.until(lambda: False, 0.05, "no batch")
    until(lambda: not sender.transfers.passes)
    transfers.write(Loaded(1))
    sender.until(lambda: True, 5, "no batch")
    sender.version = 2
    with pytest.raises(PrlError, match="policy version 2"):
        sender.until(lambda: True, 0.05, "no batch")
    transfers.end()
    sender.until(lambda: True, 5, "no batch")


def test_the_engines_have_a_version_before_a_checkpoint_of_it_is_written(sender, sides):
    written = []
    write = sender.once_loaded(written.append, 0.05)
    with pytest.raises(PrlError, match="policy version 1"):
        write(1)
    assert written == []
    sides.ours.write(Loaded(1))
    until(lambda: sender.transfers.read(Loaded))
    write(1)
    assert written == [1]


@pytest.mark.parametrize("way", ["memory", "group"])
def test_a_transfer_that_fails_is_called_off_and_the_next_one_has_the_weights(
    sender, sides, tmp_path, monkeypatch, capfd, way
):
    """The first order is for a worker that does not come. The sender's socket may be out of reach."""
    if way == "group":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))  # no socket has so long a path
        os.mkdir(tempfile.tempdir)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    transfers, got = sides.ours, {}

    def worker():
        until(lambda: transfers.is_off(transfers.store(1)))
        transfers.write(Order(2, transfers.store(2), 2, 60.0))
        got.update(received(transfers, 2, 2**20))
        transfers.write(Loaded(1))

    transfers.write(Order(1, transfers.store(1), 2, 0.3))
    thread = threading.Thread(target=worker)
    thread.start()
    sender.until(lambda: True, 60, "no batch")
    thread.join()
    assert "policy version 1 was not sent: waited 0.3 s to meet: peer 1 of 2" in capfd.readouterr().err
    whole = sender.model.state_dict()
    assert list(got) == [spec.name for spec in transfers.read(Layout).tensors]
    assert all(torch.equal(tensor, whole[name]) for name, tensor in got.items())
    assert sender.spent() > 0.3 and sender.spent() == 0.0
    assert type(sender.peers) is {"memory": Shared, "group": Group}[way]
