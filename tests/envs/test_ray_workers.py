"""Workers on the nodes of a Ray cluster do what local ones do, and are replaced with their node."""

import asyncio
import contextlib
import os
import signal

import misdeeds
import pytest
from graded_tasks import graded
from ray_nodes import ray_nodes
from run_processes import wait_until

from prl.config.compose import compose
from prl.engines.sampler import Sampler
from prl.engines.tokenizers import load_tokenizer
from prl.envs.environment import Environment
from prl.envs.grading import give_to_workers
from prl.envs.ray_workers import RayWorkers
from prl.launch.components import renderer_of
from prl.launch.plan import Bundle, worker_name
from prl.launch.ray import RayLauncher
from prl.tools.env_check import ROOM, Script

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray workers")]  # of one cluster

LIMIT_S = 90.0
"""For what takes a moment, on a busy machine."""
ACTOR = "ray::WorkerHost"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6*7"}}\n</tool_call>'


@pytest.fixture(scope="module")
def nodes():
    with ray_nodes(token=False) as nodes, pytest.MonkeyPatch.context() as patch:
        for name, cpus in (("head", 0), ("one", 1), ("two", 1)):
            nodes.add(name, cpus)
        for name, value in nodes.environment.items():
            patch.setenv(name, value)
        yield nodes


def reserved(launcher, env, count):
    launcher.reserve([Bundle(worker_name(env, number), None, cpus=1, gpus=0) for number in range(count)])


@contextlib.asynccontextmanager
async def working(launcher, count, *kinds):
    """Tasks with workers on the cluster, which do these things."""
    tasks = [misdeeds.task(kind) for kind in kinds]
    reserved(launcher, "mine", count)
    workers = RayWorkers("mine", ["prl.envs.grading"], 0.5, count, launcher.place_of_worker)
    give_to_workers(tasks, workers)
    async with workers.serving():
        yield tasks


async def scores(name, config, place=None):
    """What grading leaves on some episodes of an env."""
    environment = Environment(name, config.envs[name], eval_tasks=0, place=place)
    tokenizer = load_tokenizer(config.model.path, "model.path", config.model.trust_remote_code)
    renderer = renderer_of(*config.node_of(name, "renderer"), config.model, tokenizer)
    found = []
    async with environment.serving():
        for task, reply in zip(environment.tasks[:4], ("42", None, "", "no number"), strict=True):
            replies = [str(task.data.answer) if reply is None else reply]
            script = Script([CALL] * (name == "calculator") + replies, tokenizer, renderer.get_stop_token_ids()[0])
            sampler = Sampler()
            sampler.attach(pool=script, renderer=renderer, max_model_len=ROOM, seed=0)
            for rollout in await environment.play(task, 2, sampler, group_id=0):
                assert not rollout.failed, rollout.error
                found.append((rollout.trace.rewards, rollout.trace.metrics, rollout.trace.info))
    return found


@pytest.mark.parametrize("name", ["math", "calculator"])
async def test_rewards_are_those_of_local_workers(nodes, name):
    local = compose(["run.name=one", f"env={name}", f"envs.{name}.in_process=false"])
    there = compose(["run.name=one", f"env={name}", "launcher=ray", f"envs.{name}.workers={{count: 2, where: ray}}"])
    with RayLauncher() as launcher:
        reserved(launcher, name, 2)
        found = await scores(name, there, launcher.place_of_worker)
    assert found == await scores(name, local)
    assert len({str(each) for each in found}) > 1
    wait_until(lambda: not nodes.running(ACTOR), LIMIT_S, "no worker stays")


async def test_each_misdeed_costs_only_its_own_call(nodes, monkeypatch):
    ends = {
        "os_exit": "EnvProcessEnded: the env's code ended its process: exit status 3",
        "crashes": "EnvProcessEnded: the env's code ended its process: SIGSEGV",
        "hoards": "TaskError: task Misdeeds scoring: MemoryError",
        "raises": "TaskError: task Misdeeds scoring: ValueError: \x1b[2Jno such answer",
        "records_an_object": "RuntimeError: Encoding objects of type object",
        "blocks": "TimeoutError",
        "backtracks": "TimeoutError",
    }
    with RayLauncher() as launcher:
        async with working(launcher, 1, "fine", *ends) as (fine, *wild):
            before = (await graded(fine, LIMIT_S)).metrics["process"]
            for task, (kind, expected) in zip(wild, ends.items(), strict=True):
                error = await graded(task, 1.0 if expected == "TimeoutError" else LIMIT_S)
                assert f"{type(error).__name__}: {error}".startswith(expected), kind
                assert (await graded(fine, LIMIT_S)).reward == 1.0, f"the next one is graded after {kind}"
            assert (await graded(fine, LIMIT_S)).metrics["process"] != before
            monkeypatch.setattr("prl.envs.ray_workers.ANSWER_S", 3.0)
            (hanging,) = nodes.running(ACTOR)
            os.kill(hanging, signal.SIGSTOP)
            assert isinstance(await graded(fine, 1.0), TimeoutError)
            assert (await graded(fine, LIMIT_S)).reward == 1.0 and hanging not in nodes.running(ACTOR)


async def test_a_worker_is_replaced_with_its_node(nodes):
    with RayLauncher() as launcher:
        async with working(launcher, 2, "waits", "blocks") as (waits, blocks):
            blocked = [asyncio.create_task(graded(blocks, 20)) for _ in range(2)]
            await asyncio.sleep(1)
            nodes.kill("one")
            lost, late = sorted([f"{type(error).__name__}: {error}" for error in await asyncio.gather(*blocked)])
            assert lost.startswith("EnvProcessEnded: the worker is lost: ") and late == "TimeoutError: "
            nodes.add("three", 1)
            processes = set()
            async with asyncio.timeout(LIMIT_S):
                while len(processes) < 2:
                    both = await asyncio.gather(graded(waits, LIMIT_S), graded(waits, LIMIT_S))
                    processes = {trace.metrics["process"] for trace in both}
            assert set(nodes.running(ACTOR).values()) == {"two", "three"}
