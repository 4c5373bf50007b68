"""An env of somebody else's, whose grader and loader misbehave: the run goes on and can be stopped."""

import json
import os
import signal
import textwrap
import time

import pytest

pytestmark = pytest.mark.engine

ENV = """
    import os, sys, time
    import verifiers.v1 as vf
    __all__ = ["WildTaskset"]

    def spins():
        while True:
            pass

    def hoards():
        held = []
        while True:
            held.append(bytearray(1 << 24))

    def interrupts():
        raise KeyboardInterrupt

    def raises():
        raise ValueError("\\x1b]0;owned\\x07no such \\x1b[2Janswer")

    DEEDS = {
        "spins": spins,
        "blocks": lambda: time.sleep(600),
        "os_exit": lambda: os._exit(3),
        "sys_exit": lambda: sys.exit(3),
        "interrupts": interrupts,
        "is_killed": lambda: os.kill(os.getpid(), 9),
        "hoards": hoards,
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
        load: str = ""

    class WildTaskset(vf.Taskset[WildTask, WildConfig]):
        def load(self):
            if self.config.load:
                DEEDS[self.config.load]()
            for number in range(50):
                yield (StuckTask if self.config.stuck else WildTask)(vf.TaskData(prompt=f"{number}+{number}="))
"""
CONF = """
    # @package envs.wild
    taskset: wild_env
    args: {stuck: false, load: ""}
"""
CHOSEN = ("env=wild", "hydra.searchpath=[file://wild_conf]", "orchestrator.eval.every=null")
SAID = {
    "spins": "not finished after 12 s",
    "blocks": "not finished after 12 s",
    "os_exit": "exit status 3",
    "sys_exit": "let SystemExit escape",
    "interrupts": "let KeyboardInterrupt escape",
    "is_killed": "SIGKILL (out of memory",
    "hoards": "emory",
    "raises": "no such ",
    "gives_nan": "the grader gave reward nan",
}
"""What the reason of the rollout says, by what its grader did."""


@pytest.fixture
def wild(tmp_path):
    """The overrides that choose the env, which lies in the folder of the run."""
    folder = tmp_path / "wild_conf" / "env"
    folder.mkdir(parents=True)
    (tmp_path / "wild_env.py").write_text(textwrap.dedent(ENV).lstrip())
    (folder / "wild.yaml").write_text(textwrap.dedent(CONF).lstrip())
    return CHOSEN


def test_a_run_whose_graders_spin_answers_sigterm(watched, wild, tmp_path, outcome):
    run = watched(*wild, "envs.wild.args.stuck=true", "envs.wild.timeout_s=600")
    run.until((tmp_path / "spins").exists, 120, "a grader spins")
    time.sleep(1.0)
    asked = time.monotonic()
    os.kill(run.process.pid, signal.SIGTERM)
    status, _ = run.ended(20)
    ended_s = time.monotonic() - asked
    assert status == 143 and ended_s < 15
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "stopped"
    outcome(
        fault="every grader spins, and SIGTERM",
        phase="scoring",
        happened="ended with status 143: stopped",
        noticed_s=ended_s,
        left=run.left,
        resumed="was not begun again",
    )
    assert run.left == "nothing"


def test_each_misdeed_of_a_grader_costs_its_rollout_and_not_the_run(watched, wild, outcome):
    knobs = ("orchestrator.batch_size=128", "envs.wild.timeout_s=12", "envs.wild.worker_memory_gb=0.5")
    waits = "orchestrator.max_off_policy_steps=1"  # a step waits for its slowest rollouts, which is their deadline here
    watch = watched(*wild, *knobs, waits, "max_steps=3")
    run = watch.whole()
    assert run.status == 0, run.stderr
    assert run.result["status"] == "completed" and run.result["steps"] == 3
    counted = sum(run.column("errors/all/env")) + sum(run.column("errors/all/timeout"))
    records = [record for step in range(1, 4) for record in run.rollouts(step)]
    reasons = [record["outcome"]["reason"] for record in records if record["outcome"]["stage"] == "failed"]
    assert counted == len(reasons) < 0.2 * len(records)
    for kind, says in SAID.items():
        assert any(says in reason for reason in reasons), (kind, reasons)
        assert watch.left == "nothing"
        outcome(
            fault=f"a grader {kind.replace('_', ' ')}",
            phase="scoring",
            happened=f"went on: its rollout failed, {says!r}",
            noticed_s=None,
            left=watch.left,
            resumed="was not ended",
        )
    assert all(any(says in reason for says in SAID.values()) for reason in reasons), reasons
    for text in (run.stderr, (run.dir / "logs" / "orchestrator.log").read_text()):
        assert "\x1b" not in text and "\x07" not in text
    assert "env wild: its metric oddity is nan" in run.stderr
    assert run.stderr.count("its metric oddity is nan") == 1
    played = [record for record in records if record["outcome"]["stage"] != "failed"]
    assert played and all(record["metrics"]["oddity"] is None for record in played)


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        ("sys_exit", "loading the tasks of WildTaskset failed: SystemExit: 3"),
        ("raises", "envs.wild.args: \\x1b]0;owned\\x07no such"),
    ],
)
def test_a_misdeed_of_a_loader_is_refused_before_anything_starts(train, wild, outcome, deed, says):
    began = time.monotonic()
    run = train(*wild, f"envs.wild.args.load={deed}")
    ended_s = time.monotonic() - began
    outcome(
        fault=f"a taskset's load {deed.replace('_', ' ')}",
        phase="start",
        happened=f"refused with status {run.status}: {' '.join(run.stderr.split())[:120]}",
        noticed_s=ended_s,
        left=", ".join(sorted(path.name for path in run.dir.glob("*"))) or "nothing",
        resumed="was not begun",
    )
    assert run.status != 0 and says in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert "\x1b" not in run.stderr and ended_s < 20
    assert not (run.dir / "logs" / "trainer.log").exists()
