"""A policy's server that misbehaves: a door before the shared engine spoils its replies, holds them or refuses.

A broken reply costs its rollouts, with its reason; nothing of it trains. Where all are broken, the run ends soon and
names the server.
"""

import asyncio
import os
import signal
import time

import pytest
from door import (
    BROKEN,
    GENERATE,
    UPDATE,
    Door,
    answers_500,
    cut_connection,
    given_up,
    hangs,
    nothing_at_all,
    one_sentinel,
    without_logprobs,
    wrong_tokens,
)
from engines import policy_spec
from run_processes import family, running, wait_until

from prl.config.model_folder import embedding_rows
from prl.errors import EngineError
from prl.inference.client import InferencePool
from prl.launch.launcher import ProcessDied
from prl.launch.local import LocalLauncher
from prl.models import model_path

pytestmark = pytest.mark.engine

ON_POLICY = (
    "orchestrator.batch_size=64",
    "orchestrator.max_async_level=0",
    "orchestrator.eval.every=null",
    "trainer.token_export=true",
)


@pytest.fixture
def door(engine):
    door = Door(engine.url)
    yield door
    door.close()


def test_each_broken_reply_costs_its_rollouts_and_nothing_of_it_trains(watched, door, outcome):
    """Every second reply is broken, each in another way."""
    faults = [*BROKEN, given_up, one_sentinel]

    def choose(request, number):
        if request.path != GENERATE or number % 2 == 0 or number // 2 >= len(faults):
            return None
        return faults[number // 2]

    door.choose = choose
    # Without filters: a group whose rewards are all the same would not reach the trainer, the one with sentinels too.
    knobs = (f"inference.urls=[{door.url}]", "orchestrator.max_error_share=0.9", "filters=none")
    watch = watched(*ON_POLICY, *knobs, "orchestrator.group_size=8", "max_steps=6")
    run = watch.whole()
    assert run.status == 0, run.stderr
    assert door.spoilt == {fault.__name__: 1 for fault in faults}
    records = [record for step in range(1, 7) for record in run.rollouts(step)]
    reasons = [record["outcome"]["reason"] for record in records if record["outcome"]["stage"] == "failed"]
    for fault, says in BROKEN.items():
        costs = [reason for reason in reasons if says in reason]
        assert len(costs) >= 8, f"{fault.__name__}: {says!r} not in {sorted(set(reasons))}"
        assert all(door.url in reason for reason in costs)
    assert len(reasons) == 8 * len(BROKEN)
    assert sum(run.column("rollouts/errored")) == len(reasons)
    assert sum(run.column("errors/all/engine")) == len(reasons)
    assert run.column("engine/requests_reissued")[-1] == 1 and sum(run.column("tokens/invalid_logprobs")) == 8
    trained = all_trained(run)
    rows = embedding_rows(model_path("tiny"))
    assert len(trained) > 1000
    for token, sampler, trainer, fate in trained:
        assert 0 <= token < rows and fate == "rl kept", (token, fate)
        assert abs(sampler - trainer) < 1e-3
    outcome(
        fault=f"the engine's replies, every second: {', '.join(fault.__name__ for fault in faults)}",
        phase="generating",
        happened=f"went on: {len(reasons)} rollouts failed with their reasons, no token of them trained",
        noticed_s=None,
        left=watch.left,
        resumed="was not ended",
    )


FROM_NOW_ON = {
    "answers 500": (GENERATE, answers_500, "rollouts of env 'math' failed"),
    "update hangs": (UPDATE, hangs, "did not load policy version"),
    "hangs": (GENERATE, hangs, "waiting for model 'policy' at "),
    "cuts connections": (GENERATE, cut_connection, "rollouts of env 'math' failed"),
    "sends nothing": (GENERATE, nothing_at_all, "rollouts of env 'math' failed"),
    "has no logprobs": (GENERATE, without_logprobs, "rollouts of env 'math' failed"),
    "sends wrong tokens": (GENERATE, wrong_tokens, "rollouts of env 'math' failed"),
    "refuses": (None, None, "HTTP 503"),
    "update answers 500": (UPDATE, answers_500, "/prl/load_policy answered HTTP 500"),
    "update is not confirmed": (UPDATE, nothing_at_all, "does not say that policy version"),
    "update cuts connections": (UPDATE, cut_connection, "/prl/load_policy failed"),
}
"""What the server does from some moment on: the route, the fault, and what the run says as it ends."""
IN_SUITE = ("answers 500",)


@pytest.mark.parametrize(
    "faults", [IN_SUITE, pytest.param([name for name in FROM_NOW_ON if name not in IN_SUITE], marks=pytest.mark.chaos)]
)
def test_a_server_that_is_broken_for_good_ends_the_run_with_its_name_and_the_run_goes_on_later(
    watched, door, outcome, faults
):
    """One run, which ends of one fault after the other, and comes to its last step once the server is well again."""
    knobs = (
        *ON_POLICY[:3],
        f"inference.urls=[{door.url}]",
        "inference.update_timeout_s=4",
        "envs.math.timeout_s=5",
        "checkpoint.every=1",
        "run.resume=auto",
    )
    steps = 0
    for name in faults:
        route, fault, says = FROM_NOW_ON[name]
        run = watched(*knobs, "max_steps=100000")
        run.until(lambda: len(run.steps) > steps + 3, 120, f"the run trains ({name})")  # noqa: B023
        door.choose = lambda request, number: fault if request.path == route else None  # noqa: B023
        door.open, began = route is not None, time.monotonic()
        status, said = run.ended(60)
        noticed_s = time.monotonic() - began
        door.choose, door.open = (lambda request, number: None), True
        last = said.strip().splitlines()[-1]
        outcome(
            fault=f"the engine {name}, from some moment on",
            phase="updating" if route == UPDATE else "generating",
            happened=f"ended with status {status}: {last.replace(door.url, '<url>')[:160]}",
            noticed_s=noticed_s,
            left=run.left,
            resumed=True,  # the next one goes on from here, and the last to the end
        )
        assert status == 1 and "Traceback" not in said, said
        error = next(line for line in said.splitlines() if line.startswith("error: "))
        assert says in error and door.url in error and run.left == "nothing"
        steps = len(run.steps) - 1
    run = watched(*knobs, f"max_steps={steps + 2}")
    status, said = run.ended(90)
    assert status == 0 and "going on after step" in said, said
    assert [line["step"] for line in run.steps] == list(range(steps + 3))


@pytest.mark.parametrize("ended", ["server", "core"])
async def test_a_server_that_is_asked_to_end_or_lost_its_core_ends_although_requests_are_open(tmp_path, ended):
    """vLLM ends the engine first, and nobody answers them any more. One that lost its core answers them with errors."""
    with LocalLauncher() as launcher:
        url = launcher.start_engine(policy_spec("token", tmp_path / "inference.log"))
        pool = InferencePool([url], "policy", "token")
        try:
            await pool.wait_ready(240, launcher.ensure_alive)

            async def ask():
                while True:
                    await pool.generate([5, 6, 7], {"max_tokens": 500, "ignore_eos": True, "seed": None}, n=8)

            asking = [asyncio.create_task(ask()) for _ in range(10)]
            await asyncio.sleep(2.0)
            assert not any(task.done() for task in asking)
            server = server_at(url)
            if ended == "core":
                [core] = [pid for pid, line in family(server).items() if "EngineCore" in line]
                os.kill(core, signal.SIGKILL)
                errors = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 10)
            else:
                os.kill(server, signal.SIGTERM)
            wait_until(lambda: not running(server), 20, "the server's end", pause_s=0.1)
            if ended == "server":
                errors = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(error, EngineError) for error in errors), errors
        finally:
            await pool.close()


def test_a_server_that_is_asked_to_end_while_it_starts_ends(tmp_path):
    with LocalLauncher() as launcher:
        url = launcher.start_engine(policy_spec("token", tmp_path / "inference.log"))
        wait_until(lambda: (pid := server_at(url)) and "EngineCore" in str(family(pid)), 60, "the engine's core")
        server = server_at(url)
        os.kill(server, signal.SIGTERM)
        wait_until(lambda: not running(server), 20, "the server's end")
        with pytest.raises(ProcessDied, match=r"process 'inference' ended with status 143 \(killed by SIGTERM\)"):
            wait_until(launcher.ensure_alive, 5, "that the launcher sees it")


def server_at(url: str) -> int | None:
    """The process that serves, or is going to serve, at `url`, once it is there."""
    port = url.rpartition(":")[2]
    found = family(os.getpid()).items()
    own = ("-m prl.inference.server", f"--port {port} ")
    return next((pid for pid, line in found if all(map(line.__contains__, own)) and "children.py" not in line), None)


def all_trained(run):
    """(token, sampler's and trainer's logprob, fate) of each token that fed a loss."""
    return [
        (token, sampler, trainer, fate)
        for step in range(1, len(run.steps) + 1)
        for line in run.tokens(step)
        for token, sampler, trainer, fate in zip(
            line["token_ids"], line["inference_logprobs"], line["trainer_logprobs"], line["fate"], strict=True
        )
        if fate.startswith("rl")
    ]
