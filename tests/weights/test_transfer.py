"""Weights from rank to engine by gloo: the trainer's ranks and the engines are threads, messages are files."""

import asyncio
import functools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from patience import patient

from prl.base.errors import EngineError
from prl.rollouts.messages import StepBatch
from prl.trainer import worker
from prl.transport import gloo
from prl.transport.files import FileTransport
from prl.weights.transfer import TransferWeights


class Policy:
    """Some tensors. The ranks gather each together: who gathers another one, or one too few, waits for ever."""

    def __init__(self, barrier=None, first=0.0):
        head = torch.arange(first, first + 6).reshape(2, 3).t()  # no rows side by side
        self.tensors = {"head": head, "norm": torch.tensor([first], dtype=torch.bfloat16)}
        self.barrier = barrier
        self.passes = 0

    @property
    def described(self):
        return [(name, tensor.dtype, list(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self):
        for name, tensor in self.tensors.items():
            if self.barrier is not None:
                self.barrier.wait(10)
            yield name, tensor
        self.passes += 1


class Engine:
    """Loads what it is offered, as a worker does; `fails` says after how many tensors it is lost."""

    def __init__(self, fails=None):
        self.fails = fails
        self.held = []

    async def receive_weights(self, version, offer, timeout_s):
        async with asyncio.timeout(timeout_s), offer() as told:
            self.held.append(await asyncio.to_thread(self.load, **told))

    def load(self, init, update):
        if self.fails == 0:
            raise EngineError("it is dead")
        group = gloo.join(
            init["master_address"], init["master_port"], init["secret"], 1, init["world_size"], init["timeout_s"]
        )
        held = {}
        for name, dtype, shape in zip(update["names"], update["dtype_names"], update["shapes"], strict=True):
            if len(held) == self.fails:
                raise EngineError("it is dead")
            held[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            gloo.broadcast(group, held[name])
        gloo.part(group)
        return held


@pytest.fixture
def make_weights(tmp_path):
    """`make_weights(rank)`: a side of its own."""

    def make(**options):
        weights = TransferWeights(timeout_s=patient(2.0))
        weights.attach(FileTransport(tmp_path), **options)
        return weights

    return make


@pytest.fixture
def in_thread():
    """`in_thread(function, …)`: begin it; what it raised is raised at the end."""
    begun = []

    def begin(function, *args):
        outcome = SimpleNamespace(error=None)

        def run():
            try:
                function(*args)
            except BaseException as error:
                outcome.error = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        begun.append((thread, outcome))
        return thread

    yield begin
    for thread, outcome in begun:
        thread.join(patient(10.0))
        assert not thread.is_alive(), "it hangs"
        if outcome.error is not None:
            raise outcome.error


def hold(weights, policy, version):
    """What a rank does after a step: publish, and wait until the engines have it."""
    weights.publish(version, policy, None)
    if weights.rank == 0:
        weights.transport.publish(version, {})
    weights.hold(version)


async def load(weights, engine, version):
    """Load a version into an engine once the trainer has published it."""
    await until(lambda: weights.transport.receive_metrics(version) is not None)
    await weights.load(engine, version, patient(5.0))


def assert_holds(held, policy):
    assert held.keys() == policy.tensors.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in policy.tensors.items())


async def until(condition):
    async with asyncio.timeout(patient(5.0)):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_engines_get_each_version_and_ranks_go_on_then(make_weights, in_thread, ranks):
    barrier = threading.Barrier(ranks)
    policies = [Policy(barrier, first=rank * 100.0) for rank in range(ranks)]  # the first rank's are what is sent
    sides = [make_weights(rank=rank) for rank in range(ranks)]
    here, engines = make_weights(), [Engine(), Engine()]
    for version in (1, 2):
        threads = [in_thread(hold, *of, version) for of in zip(sides, policies, strict=True)]
        await until(lambda version=version: here.transport.receive_metrics(version) is not None)
        assert all(thread.is_alive() for thread in threads), "they keep the version"

        async def both(version, offer, timeout_s):
            await asyncio.gather(*(engine.receive_weights(version, offer, timeout_s) for engine in engines))

        await load(here, SimpleNamespace(receive_weights=both), version)
        await until(lambda threads=threads: not any(thread.is_alive() for thread in threads))
        for engine in engines:
            assert_holds(engine.held[-1], policies[0])
    assert [policy.passes for policy in policies] == [4] * ranks


@pytest.mark.parametrize("fails", [0, 1])
async def test_an_engine_that_is_lost_holds_up_neither_ranks_nor_others(make_weights, in_thread, capfd, fails):
    """Before it comes, and in the middle: the next one, and every rank, has all tensors."""
    barrier = threading.Barrier(2)
    policies, here = [Policy(barrier) for _ in range(2)], make_weights()
    ranks = [in_thread(hold, make_weights(rank=rank), policies[rank], 1) for rank in range(2)]
    began = time.monotonic()
    with pytest.raises(EngineError, match="it is dead"):
        await load(here, Engine(fails), 1)
    engine = Engine()
    await load(here, engine, 1)
    await until(lambda: not any(rank.is_alive() for rank in ranks))
    assert time.monotonic() - began < patient(1.5), "nobody waits for a deadline"
    assert_holds(engine.held[0], policies[0])
    assert [policy.passes for policy in policies] == [2, 2]
    assert "policy version 1: an engine has not got it: " in capfd.readouterr().err


async def test_an_engine_that_says_nothing_is_given_up_at_the_deadline(make_weights, in_thread):
    here, rank = make_weights(), make_weights()
    rank.timeout_s = 0.3
    training = in_thread(hold, rank, Policy(), 1)
    await until(lambda: here.transport.receive_metrics(1) is not None)
    async with here._offered(1) as told:
        silent = await asyncio.to_thread(functools.partial(joined, **told["init"]))
        await until(lambda: rank.served == 1)
        engine = Engine()
        await load(here, engine, 1)
        await until(lambda: not training.is_alive())
        del silent
    assert_holds(engine.held[0], Policy())


def joined(master_address, master_port, secret, rank_offset, world_size, timeout_s):
    return gloo.join(master_address, master_port, secret, rank_offset, world_size, timeout_s)


async def test_an_engine_that_is_started_again_gets_the_version_before_the_next_batch(make_weights, in_thread):
    """Once the batch is sent, the version may change at any moment: then it is to ask for the next one."""
    here, rank, engine, policy = make_weights(), make_weights(), Engine(), Policy()
    in_thread(hold, rank, policy, 1)
    await load(here, engine, 1)
    batches = []

    def wait():
        batches.append(worker.wait_for_batch(rank.transport, 2, 0, patient(5.0), weights=rank))

    waiting = in_thread(wait)
    again = Engine()
    await load(here, again, 1)
    assert_holds(again.held[0], policy)
    here.transport.send_batch(StepBatch(2, [], 0), 0)
    await until(lambda: not waiting.is_alive())
    assert batches[0].step == 2
    late = asyncio.create_task(load(here, Engine(), 1))
    await asyncio.sleep(0.05)
    assert not late.done(), "it waits for the step that is trained"
    training = in_thread(hold, rank, policy, 2)
    with pytest.raises(EngineError, match="version 1 is gone"):
        await late
    await load(here, again, 2)
    await until(lambda: not training.is_alive())


async def test_a_batch_that_was_sent_before_waits_for_the_engines(make_weights, in_thread):
    """The trainer has the batch of step 2 when it has trained step 1: it trains on it once version 1 is loaded."""
    here, rank, engine = make_weights(), make_weights(), Engine()
    for step in (1, 2):
        here.transport.send_batch(StepBatch(step, [], 0), 0)
    training = in_thread(hold, rank, Policy(), 1)
    await asyncio.sleep(0.05)
    assert training.is_alive()
    await load(here, engine, 1)
    await until(lambda: not training.is_alive())
    assert_holds(engine.held[0], Policy())


async def test_the_last_version_is_there_until_the_run_is_over(make_weights, in_thread):
    here, rank, policy = make_weights(), make_weights(), Policy()
    training = in_thread(hold, rank, policy, 3)
    await load(here, Engine(), 3)
    await until(lambda: not training.is_alive())
    ending = in_thread(rank.serve_to_the_end, 3)
    again = Engine()
    await load(here, again, 3)
    assert_holds(again.held[0], policy)
    assert ending.is_alive()
    here.end()
    await until(lambda: not ending.is_alive())


async def test_a_run_that_is_stopped_waits_for_no_engine(make_weights, in_thread):
    here, rank = make_weights(), make_weights()
    training = in_thread(hold, rank, Policy(), 1)
    here.end()
    await until(lambda: not training.is_alive())
