"""A teacher that misbehaves: a door before the shared teacher spoils its replies, holds them, or is shut."""

import json
import math
import time

import pytest
from door import SCORE, UNSCORED, Door, hangs, one_row_less, slow, spoiling

pytestmark = pytest.mark.engine


@pytest.fixture
def door(teacher):
    door = Door(teacher[-1].partition("=")[2])
    yield door
    door.close()


@pytest.fixture
def taught(teacher, door):
    """Overrides of a run that has the teacher behind the door."""
    return (
        *teacher[:-1],
        f"teacher.base_url={door.url}/v1",
        "orchestrator.eval.every=null",
        "orchestrator.batch_size=64",
    )


MIXED = ("experiment=mixed_grpo_opd", "teacher.timeout_s=20", "max_steps=100000")
"""reverse_text needs the teacher, and math does not."""


def trained_envs(run) -> list[set[str]]:
    """Which envs each step so far trained on."""
    return [{env for env in ("math", "reverse_text") if f"reward/{env}/mean" in line} for line in run.steps[1:]]


def reasons_of(run) -> list[str]:
    return [
        outcome["reason"]
        for path in (run.dir / "rollouts").glob("step_*.jsonl")
        for line in path.read_text().splitlines()
        if (outcome := json.loads(line)["outcome"])["stage"] == "failed"
    ]


def test_each_broken_score_costs_its_rollout_and_nothing_of_it_trains(watched, taught, door, outcome):
    faults = list(UNSCORED)
    asked = iter(range(10**9))

    def choose(request, number):
        if request.path != SCORE or b'"prompt_logprobs"' not in request.body or (n := next(asked)) % 4:
            return None
        return faults[n // 4 % len(faults)]

    door.choose = choose
    watch = watched("algo=opd", *taught, "max_steps=3", "trainer.token_export=true")
    run = watch.whole()
    assert run.status == 0, run.stderr
    reasons = reasons_of(run)
    for fault, says in UNSCORED.items():
        assert any(says in reason and door.url in reason for reason in reasons), (fault.__name__, set(reasons))
    assert sum(run.column("errors/all/reference")) == sum(run.column("rollouts/errored")) >= len(faults)
    scores = [
        (score, fate)
        for step in (1, 2, 3)
        for line in run.tokens(step)
        for score, fate in zip(line["ref_logprobs"], line["fate"], strict=True)
        if fate.startswith("ref_kl")
    ]
    assert len(scores) > 500 and all(math.isfinite(score) and -100 < score <= 0 for score, _ in scores)
    outcome(
        fault=f"the teacher's replies, every fourth: {', '.join(fault.__name__ for fault in faults)}",
        phase="scoring",
        happened=f"went on: {len(reasons)} rollouts failed with their reasons, no token of them trained",
        noticed_s=None,
        left=watch.left,
        resumed="was not ended",
    )


def test_a_teacher_that_goes_away_holds_up_nobody_and_may_come_back(watched, taught, door, outcome):
    run = watched(*taught, *MIXED)
    run.until(lambda: {"math", "reverse_text"} in trained_envs(run), 60, "both envs train")
    door.open, began = False, time.monotonic()
    run.until(lambda: trained_envs(run)[-1] == {"math"}, 60, "math goes on alone")
    noticed_s = time.monotonic() - began
    run.until(lambda: trained_envs(run)[-4:] == [{"math"}] * 4, 60, "math goes on alone")
    door.open = True
    run.until(lambda: trained_envs(run)[-1] == {"math", "reverse_text"}, 60, "both train again")
    assert any("503" in reason and door.url in reason for reason in reasons_of(run))
    run.process.terminate()
    assert run.ended(60)[0] == 143
    outcome(
        fault="the teacher dies and comes back",
        phase="scoring",
        happened="went on: the env that needs it stood still and trained again later, the other trained on",
        noticed_s=noticed_s,
        left=run.left,
        resumed="was not ended",
    )
    assert run.left == "nothing"


def stays_away(run, door):
    run.until(lambda: {"math", "reverse_text"} in trained_envs(run), 60, "both envs train")
    door.open = False


def is_down_at_the_start(run, door):
    pass


def hangs_for_good(run, door):
    run.until(lambda: {"math", "reverse_text"} in trained_envs(run), 60, "both envs train")
    door.choose = lambda request, number: hangs


def sends_too_few_logprobs(run, door):
    run.until(lambda: {"math", "reverse_text"} in trained_envs(run), 60, "both envs train")
    short = spoiling("fewer logprobs than tokens", one_row_less)
    door.choose = lambda request, number: short if request.path == SCORE else None


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (stays_away, "error: model 'tiny-teacher' at {url} was away for 8 s"),
        pytest.param(
            is_down_at_the_start, "model 'tiny-teacher' at {url} was not ready after 8 s", marks=pytest.mark.chaos
        ),
        pytest.param(hangs_for_good, "error: model 'tiny-teacher' at {url}", marks=pytest.mark.chaos),
        pytest.param(sends_too_few_logprobs, "tokens came with", marks=pytest.mark.chaos),
    ],
)
def test_a_teacher_that_is_broken_for_good_ends_the_run_with_its_name(watched, taught, door, outcome, fault, says):
    door.open = fault is not is_down_at_the_start
    began = time.monotonic()
    run = watched(*taught, *MIXED, "teacher.timeout_s=8", "checkpoint.every=1", "run.resume=auto")
    fault(run, door)
    if fault is not is_down_at_the_start:
        began = time.monotonic()
    status, said = run.ended(90)
    noticed_s = time.monotonic() - began
    error = next(line for line in said.splitlines() if line.startswith("error: "))
    assert status == 1 and says.format(url=door.url) in error and door.url in error and "Traceback" not in said, said
    left = run.left
    door.open, door.choose = True, lambda request, number: None
    steps = max(0, len(run.steps) - 1)
    run = watched(*taught, *MIXED, f"max_steps={steps + 2}", "checkpoint.every=1", "run.resume=auto")
    assert run.ended(90)[0] == 0, run.stderr.read_text()
    assert [line["step"] for line in run.steps] == list(range(steps + 3))
    outcome(
        fault=f"the teacher {fault.__name__.replace('_', ' ')}",
        phase="start" if fault is is_down_at_the_start else "scoring",
        happened=f"ended with status {status}: {error.replace(door.url, '<url>')[:160]}",
        noticed_s=noticed_s,
        left=left,
        resumed=True,
    )
    assert left == "nothing"


@pytest.mark.chaos
def test_a_slow_teacher_is_waited_for(watched, taught, door, outcome):
    door.choose = lambda request, number: slow if request.path == SCORE else None
    run = watched(*taught, "algo=opd", "max_steps=3")
    status, said = run.ended(120)
    assert status == 0 and not any(line.get("rollouts/errored") for line in run.steps), said
    outcome(
        fault="the teacher takes a second longer for each reply",
        phase="scoring",
        happened=f"went on: {run.steps[-1]['time/rollout']:.1f} s for the last step's rollouts, none failed",
        noticed_s=None,
        left=run.left,
        resumed="was not ended",
    )
    assert run.left == "nothing"
