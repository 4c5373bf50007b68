"""Small servers of the policy that say which weights they hold: the first token of a reply is the version of them."""

import asyncio
import contextlib

import pytest

from prl.rollouts.inputs import ModelInput
from tests.conftest import Server

GENERATE, UPDATE, HEALTH = "/prl/generate", "/prl/load_policy", "/health"
BASE = 99
"""What a server says that has loaded nothing since it was started."""


class Policy(Server):
    """Holds weights until it is started anew, and forgets them then. `gates` hold what it is asked for."""

    def __init__(self):
        super().__init__()
        self.gates = {}
        self.starts = 0
        self.replies = {HEALTH: {}, GENERATE: self.generate, UPDATE: self.load}

    async def start(self):
        self.starts += 1
        self.instance, self.holds = f"instance {self.starts}", BASE
        return await super().start()

    async def passed(self, route):
        if route in self.gates:
            await self.gates[route].wait()

    async def generate(self):
        n = self.bodies[GENERATE][-1]["sampling"]["n"]
        await self.passed(GENERATE)
        row = {"token_ids": [self.holds], "logprobs": [-0.5], "finish_reason": "stop"}
        return {"choices": [row | {"index": index} for index in range(n)]}

    async def load(self):
        path = self.bodies[UPDATE][-1]["path"]
        await self.passed(UPDATE)
        self.holds = int(path.removeprefix("/w"))
        return {"loaded": path, "instance": self.instance}

    def asked(self, route=GENERATE):
        return self.calls.count(route)

    @property
    def work(self):
        """What it was asked for but its health."""
        return [route for route in self.calls if route != HEALTH]

    def hold(self, route):
        """Have requests of a route wait for the event that is returned."""
        self.gates[route] = asyncio.Event()
        return self.gates[route]


@contextlib.asynccontextmanager
async def policy_servers(count):
    """So many servers, until the block ends."""
    found = [await Policy().start() for _ in range(count)]
    try:
        yield found
    finally:
        for server in found:
            for gate in server.gates.values():
                gate.set()
            await server.stop()


async def until(condition, what="it happens"):
    try:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"5 s passed before {what}")


async def ask(pool, n=1, prefix=None):
    """(the version that the reply was sampled from, the one that the request is recorded to start from)"""
    completions = await pool.generate(ModelInput([1, 2]), {}, n=n, prefix=prefix)
    [found] = {(each.token_ids[0], each.start_version) for each in completions}
    return found


def start(pool, *args):
    return asyncio.create_task(ask(pool, *args))
