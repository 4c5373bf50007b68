"""What the policy's client does to have several servers receive weights at once. Servers and trainer are small ones.

A server says that it received what it was asked to; the trainer answers orders with the version that it has.
"""

import asyncio

import pytest
from sides import Sides, until

from prl.errors import DeadlinePassed, EngineError
from prl.inference import lasting
from prl.inference.client import InferencePool
from prl.inference.protocol import INTERRUPTED, RECEIVE
from prl.wire.buckets import TensorSpec
from prl.wire.exchange import Answer, Layout, Loaded, Order
from tests.conftest import Server

SPEC = TensorSpec("w", "bfloat16", (2, 3))


class Receiver(Server):
    """A server with `workers`; `faults` are what its next transfers end with."""

    def __init__(self, workers):
        super().__init__()
        self.workers, self.faults, self.starts = workers, [], 0
        self.replies = {"/health": {}, RECEIVE: self.receive}

    async def start(self):
        self.starts += 1
        self.instance = f"start {self.starts}"
        return await super().start()

    async def receive(self):
        body = self.bodies[RECEIVE][-1]
        if "meeting" not in body:
            return {"workers": self.workers, "instance": self.instance}
        if self.faults and (fault := self.faults.pop(0)) is not None:
            return fault
        return {"loaded": body["version"], "instance": self.instance}

    @property
    def received(self):
        return [body for body in self.bodies[RECEIVE] if "meeting" in body]


class Trainer:
    """Answers orders, in a task of its own."""

    def __init__(self, transfers):
        self.transfers, self.version, self.orders = transfers, 1, []
        transfers.write(Layout("cpu", 64, [SPEC]))

    async def run(self):
        while True:
            order = self.transfers.read(Order)
            if order is not None and order not in self.orders:
                self.orders.append(order)
                self.transfers.write(Answer(order.number, self.version))
            await asyncio.sleep(0.002)


@pytest.fixture
async def receivers():
    found = [await Receiver(2).start(), await Receiver(1).start()]
    yield found
    for server in found:
        await server.stop()


@pytest.fixture
def sides(tmp_path):
    with Sides(tmp_path / "transfer", 64) as both:
        yield both


@pytest.fixture
async def trainer(sides):
    trainer = Trainer(sides.theirs())
    task = asyncio.create_task(trainer.run())
    yield trainer
    task.cancel()


@pytest.fixture
async def pool(receivers, sides, trainer, monkeypatch):
    monkeypatch.setattr(lasting, "LOOK_S", 0.02)
    pool = InferencePool([server.url for server in receivers], "policy", "t")
    pool.transfers = sides.ours
    yield pool
    await pool.close()


async def update(pool, trainer, version):
    trainer.version = version
    await pool.update_weights(version, None)


async def test_members_have_ranks_of_their_own_and_keep_their_group(pool, receivers, trainer):
    """The trainer is peer 0, the two workers of the first server are 1 and 2, that of the second is 3."""
    await update(pool, trainer, 1)
    await update(pool, trainer, 2)
    first, second = ([body["meeting"] for body in server.received] for server in receivers)
    assert [meeting["rank_offset"] for meeting in first + second] == [1, 1, 3, 3]
    assert [order.world_size for order in trainer.orders] == [4, 4]
    assert {each["store"] for each in first + second} == {order.store for order in trainer.orders}
    assert len({order.store for order in trainer.orders}) == 1, "they met once"
    for body in receivers[0].received:
        assert body["update"]["tensors"] == [["w", "bfloat16", [2, 3]]] and body["update"]["bucket_bytes"] == 64
    assert [body["version"] for body in receivers[1].received] == [1, 2]
    assert pool.version == 2 and [server.version for server in pool.servers] == [2, 2]
    until(lambda: trainer.transfers.read(Loaded) == Loaded(2))


async def test_a_later_version_of_the_trainers_is_what_the_servers_have_then(pool, receivers, trainer):
    """It has trained on while the engines were busy: nobody is recorded to have the older one."""
    trainer.version = 3
    await pool.update_weights(2, None)
    assert pool.version == 3 and [server.version for server in pool.servers] == [3, 3]
    assert [body["version"] for server in receivers for body in server.received] == [3, 3]
    until(lambda: trainer.transfers.read(Loaded) == Loaded(3))
    assert pool.cache_salt == "v3"


async def test_an_interrupted_transfer_is_made_again_in_a_new_group(pool, receivers, trainer):
    await update(pool, trainer, 1)
    receivers[0].faults = [(INTERRUPTED, "cut")]
    await update(pool, trainer, 2)
    stores = [order.store for order in trainer.orders]
    assert len(stores) == 3 and stores[0] == stores[1] != stores[2]
    assert trainer.transfers.is_off(stores[0]) and not trainer.transfers.is_off(stores[2])
    assert [server.version for server in pool.servers] == [2, 2]


async def test_transfers_that_are_always_interrupted_end_the_run(pool, receivers, trainer):
    receivers[0].faults = [(INTERRUPTED, "cut")] * 9
    with pytest.raises(EngineError, match="cut"):
        await update(pool, trainer, 1)
    assert len(trainer.orders) == 3 and trainer.transfers.read(Loaded) is None


async def test_what_a_server_refuses_is_not_tried_again(pool, receivers, trainer):
    receivers[1].faults = [(400, "w is missing")]
    with pytest.raises(EngineError, match="w is missing"):
        await update(pool, trainer, 1)
    assert len(trainer.orders) == 1 and trainer.transfers.is_off(trainer.orders[0].store)


async def test_an_update_goes_on_without_a_server_that_died_which_receives_the_newest_when_it_is_back(
    pool, receivers, trainer
):
    await update(pool, trainer, 1)
    first, second = receivers
    await first.stop()
    await update(pool, trainer, 2)
    assert pool.version == 2 and pool.servers[0].away and pool.servers[1].version == 2
    assert trainer.orders[-1].world_size == 2 and second.received[-1]["meeting"]["rank_offset"] == 1
    trainer.version = 3  # it trains on meanwhile
    await first.start()
    async with asyncio.timeout(10):
        while pool.servers[0].away:
            await asyncio.sleep(0.01)
    assert pool.servers[0].version == 3 and len(first.received) == 2
    assert trainer.orders[-1].world_size == 3 and pool.version == 2
    await update(pool, trainer, 3)
    assert pool.version == 3 and trainer.orders[-1].world_size == 4
    assert first.received[-1]["meeting"]["rank_offset"] == 1 and second.received[-1]["meeting"]["rank_offset"] == 3


async def test_a_server_that_was_started_anew_has_a_new_group(pool, receivers, trainer):
    """The worker that was a peer is gone, though nobody has seen it die."""
    await update(pool, trainer, 1)
    await receivers[0].stop()
    await receivers[0].start()
    pool.servers[0].instance = None
    await update(pool, trainer, 2)
    assert trainer.orders[0].store != trainer.orders[1].store
    assert [server.version for server in pool.servers] == [2, 2]


async def test_a_trainer_that_does_not_answer_is_named_at_the_deadline(pool, receivers, trainer, monkeypatch):
    monkeypatch.setattr(trainer.transfers, "write", lambda message: None)
    pool.trainer_timeout_s = 0.2
    with pytest.raises(DeadlinePassed, match=r"the trainer did not begin to send its weights within 0\.2 s"):
        await update(pool, trainer, 1)
    assert [server.received for server in receivers] == [[], []], "no engine was paused"


async def test_a_server_that_is_given_up_is_not_waited_for(pool, receivers, trainer):
    """It dies while weights pass to both; the next transfers have the trainer and the other alone."""
    first, second = receivers
    held = asyncio.Event()

    async def receive():
        if "meeting" in first.bodies[RECEIVE][-1]:
            await held.wait()
        return {"workers": 2, "instance": first.instance}

    await update(pool, trainer, 1)
    first.replies[RECEIVE] = receive
    updating = asyncio.create_task(update(pool, trainer, 2))
    await asyncio.sleep(0.1)
    pool.give_up(first.url)
    held.set()
    await first.stop()
    await asyncio.wait_for(updating, 10)
    await asyncio.wait_for(update(pool, trainer, 3), 10)
    assert [order.world_size for order in trainer.orders] == [4, 4, 2, 2]
    assert [body["version"] for body in second.received][-2:] == [2, 3] and pool.version == 3
    assert pool.servers[0].away and pool.servers[0].version == 1 and not pool._searches
