"""An env of somebody else's, whose grader misbehaves: the run goes on and can be stopped."""

import os
import signal
import subprocess
import textwrap

import pytest
from run_processes import family, running, wait_until

pytestmark = pytest.mark.slow

ENV = """
    import os, sys
    import verifiers.v1 as vf
    __all__ = ["WildTaskset"]

    def spins():
        while True:
            pass

    def raises():
        raise ValueError("\\x1b]0;owned\\x07no such \\x1b[2Janswer")

    DEEDS = {
        "spins": spins,
        "os_exit": lambda: os._exit(3),
        "sys_exit": lambda: sys.exit(3),
        "raises": raises,
        "gives_nan": lambda: float("nan"),
    }

    def first(kind):
        try:
            return open(f"did_{kind}", "x").close() is None
        except FileExistsError:
            return False

    class WildTask(vf.Task):
        @vf.reward
        async def answer(self, trace: vf.Trace) -> float:
            for kind, deed in DEEDS.items():  # each once in the run, by one of eight calls
                if int(trace.id, 16) % 8 == 0 and first(kind):
                    return deed()
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
REASONS = {
    "spins": "not finished after 12 s",
    "os_exit": "exit status 3",
    "sys_exit": "let SystemExit escape",
    "raises": "no such ",
    "gives_nan": "the grader gave reward nan",
}
"""What the reason of the rollout says, by what its grader did."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The env lies in the folder of the run."""
    (tmp_path / "wild_conf" / "env").mkdir(parents=True)
    (tmp_path / "wild_env.py").write_text(textwrap.dedent(ENV).lstrip())
    (tmp_path / "wild_conf" / "env" / "wild.yaml").write_text(textwrap.dedent(CONF).lstrip())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_whose_graders_spin_answers_sigterm(inline_command, folder):
    argv, env = inline_command(*CHOSEN, "envs.wild.args.stuck=true", "envs.wild.timeout_s=600")
    process = subprocess.Popen(argv, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
    try:
        wait_until((folder / "spins").exists, 120, "a grader spins")
        processes = family(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, stderr
    wait_until(lambda: not any(map(running, processes)), 10, "all processes are gone")


def test_each_misdeed_of_a_grader_costs_its_rollout_and_not_the_run(inline):
    waits = "orchestrator.max_off_policy_steps=1"  # a step waits for its slowest rollouts, which is their deadline here
    run = inline(*CHOSEN, "orchestrator.batch_size=64", "envs.wild.timeout_s=12", waits, "max_steps=2")
    assert run.status == 0, run.stderr
    records = [record for step in (1, 2) for record in run.rollouts(step)]
    reasons = [record["outcome"]["reason"] for record in records if record["outcome"]["stage"] == "failed"]
    assert sum(run.column("errors/all/env")) + sum(run.column("errors/all/timeout")) == len(reasons)
    for kind, reason in REASONS.items():
        assert any(reason in other for other in reasons), (kind, reasons)
    assert all(any(reason in other for reason in REASONS.values()) for other in reasons), reasons
    assert "\x1b" not in run.stderr and "\x07" not in run.stderr
    assert run.stderr.count("env wild: its metric oddity is nan") == 1
    played = [record for record in records if record["outcome"]["stage"] != "failed"]
    assert played and all(record["metrics"]["oddity"] is None for record in played)
