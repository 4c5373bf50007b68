"""An env of somebody else's, whose grader misbehaves now and then: the run goes on and can be stopped."""

import json
import os
import signal
import textwrap
import time

import pytest

pytestmark = pytest.mark.engine

ENV = """
    import os, sys
    import verifiers.v1 as vf
    __all__ = ["WildTaskset"]

    class WildTask(vf.Task):
        @vf.reward
        async def answer(self, trace: vf.Trace) -> float:
            kind, bad = divmod(int(trace.id, 16), 50)  # random, of each trace
            if bad == 0:
                match kind % 4:
                    case 0:
                        while True:
                            pass
                    case 1:
                        os._exit(3)
                    case 2:
                        sys.exit(3)
                    case 3:
                        raise KeyboardInterrupt
            return min(len(trace.last_reply), 5) / 5

        @vf.metric
        def oddity(self, trace: vf.Trace) -> float:
            return float("nan")

    class StuckTask(WildTask):
        @vf.reward
        async def answer(self, trace: vf.Trace) -> float:
            open("spins", "w").close()
            while True:
                pass

    class WildConfig(vf.TasksetConfig):
        stuck: bool = False

    class WildTaskset(vf.Taskset[WildTask, WildConfig]):
        def load(self):
            for number in range(50):
                yield (StuckTask if self.config.stuck else WildTask)(vf.TaskData(prompt=f"{number}+{number}="))
"""
CONF = """
    # @package envs.wild
    taskset: wild_env
    args: {stuck: false}
"""
CHOSEN = ("env=wild", "hydra.searchpath=[file://wild_conf]", "orchestrator.eval.every=null")


@pytest.fixture
def wild(tmp_path):
    """The overrides that choose the env, which lies in the folder of the run."""
    folder = tmp_path / "wild_conf" / "env"
    folder.mkdir(parents=True)
    (tmp_path / "wild_env.py").write_text(textwrap.dedent(ENV).lstrip())
    (folder / "wild.yaml").write_text(textwrap.dedent(CONF).lstrip())
    return CHOSEN


def test_a_run_whose_graders_spin_answers_sigterm(begin, wild, tmp_path):
    process = begin(*wild, "envs.wild.args.stuck=true", "envs.wild.timeout_s=600")
    deadline = time.monotonic() + 120
    while not (tmp_path / "spins").exists():
        assert time.monotonic() < deadline and process.is_alive(), (tmp_path / "run.stderr").read_text()
        time.sleep(0.1)
    time.sleep(1.0)
    asked = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    process.join(20)
    assert not process.is_alive() and process.exitcode == 130
    assert time.monotonic() - asked < 15
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "stopped"


def test_two_in_a_hundred_bad_calls_cost_their_rollouts_and_not_the_run(train, wild):
    run = train(*wild, "max_steps=5", "orchestrator.batch_size=128", "envs.wild.timeout_s=12")
    assert run.status == 0, run.stderr
    assert run.result["status"] == "completed" and run.result["steps"] == 5
    counted = sum(run.column("errors/all/env")), sum(run.column("errors/all/timeout"))
    records = [record for step in range(1, 6) for record in run.rollouts(step)]
    reasons = [record["outcome"]["reason"] for record in records if record["outcome"]["stage"] == "failed"]
    assert counted[0] > 0 and counted[0] + counted[1] == len(reasons) < 0.1 * len(records)
    kinds = ("exit status 3", "let SystemExit escape", "let KeyboardInterrupt escape", "not finished after 12 s")
    assert {kind for kind in kinds for reason in reasons if kind in reason}, reasons
    assert all(any(kind in reason for kind in kinds) for reason in reasons)
    assert "env wild: its metric oddity is nan" in run.stderr
    assert run.stderr.count("its metric oddity is nan") == 1
    played = [record for record in records if record["outcome"]["stage"] != "failed"]
    assert played and all(record["metrics"]["oddity"] is None for record in played)
