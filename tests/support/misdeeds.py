"""An env whose graders do what the data of their tasks say: in a module that workers can import."""

import asyncio
import multiprocessing
import os
import re
import subprocess
import sys
import time

import verifiers.v1 as vf


class Misdeed(vf.TaskData):
    kind: str


class Misdeeds(vf.Task[Misdeed]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return await getattr(self, self.data.kind)(trace)

    @vf.metric
    def process(self, trace: vf.Trace) -> float:
        return float(os.getpid())

    async def fine(self, trace):
        return 1.0

    async def reads(self, trace):
        trace.info["seen"] = [trace.last_reply, trace.agent.name, len(trace.nodes[-1].token_ids)]
        return trace.nodes[-1].logprobs[0]

    async def waits(self, trace):
        await asyncio.sleep(0.3)
        return 1.0

    async def prints(self, trace):
        print("a word")
        os.system("echo of a child")  # noqa: ASYNC221
        return 1.0

    async def prints_much(self, trace):
        for _ in range(1000):
            print("word " * 1000)
        return 1.0

    async def has_processes(self, trace):
        child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(asyncio.sleep(0.01)))
        child.start()
        child.join()
        awaited = await asyncio.create_subprocess_exec("true")
        trace.info["statuses"] = [child.exitcode, subprocess.run(["true"]).returncode, await awaited.wait()]  # noqa: ASYNC221
        return 1.0

    # --- what fails ---

    async def spins(self, trace):
        while True:
            pass

    async def backtracks(self, trace):
        return float(bool(re.match("(a+)+$", "a" * 60 + "b")))  # in C code that keeps the interpreter's lock

    async def blocks(self, trace):
        time.sleep(600)  # noqa: ASYNC251

    async def swallows(self, trace):
        while True:
            try:
                await asyncio.sleep(60)
            except BaseException:
                continue

    async def os_exit(self, trace):
        os._exit(3)

    async def sys_exit(self, trace):
        sys.exit(3)

    async def exits_in_a_task(self, trace):
        await asyncio.gather(self.sys_exit(trace))

    async def interrupts(self, trace):
        raise KeyboardInterrupt

    async def cancels(self, trace):
        raise asyncio.CancelledError

    async def crashes(self, trace):
        os.kill(os.getpid(), 11)

    async def is_killed(self, trace):
        os.kill(os.getpid(), 9)

    async def hoards(self, trace):
        hoard = []
        while True:
            hoard.append(bytearray(1 << 26))

    async def recurses(self, trace):
        return await self.recurses(trace)

    async def returns_a_function(self, trace):
        return lambda: 1.0

    async def records_an_object(self, trace):
        trace.info["object"] = object()
        return 1.0

    async def records_too_much(self, trace):
        trace.info["much"] = "x" * (20 << 20)
        return 1.0

    async def raises(self, trace):
        raise ValueError("\x1b[2Jno such answer")

    async def raises_much(self, trace):
        raise ValueError("x" * (100 << 20))


def task(kind: str) -> Misdeeds:
    return Misdeeds(Misdeed(kind=kind, prompt="?"))
