"""What a step waits for and what is too old for it: the rule, and whole runs on a clock that skips the waiting."""

import asyncio
import random
import selectors
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest

from prl.algorithms.base import Algorithm
from prl.config.orchestrator import OrchestratorConfig
from prl.orchestrator.staleness import Staleness
from prl.rollouts.rollout import Stage

# --- the rule ---------------------------------------------------------------------------------------------------------


def rule(k, limit, oversampling=1.0, strict=False):
    config = OrchestratorConfig(
        max_async_level=k, max_off_policy_steps=limit, oversampling_factor=oversampling, strict_async_level=strict
    )
    return Staleness(config, max_steps=100)


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("more", range(4))
def test_rollout_is_meant_for_k_steps(k, more):
    limit = k + more if k else 0
    made = rule(k, k + more)
    for version in range(20):
        for shipped in range(version, version + k + 2):
            meant_for = {step for step in range(1, 30) if shipped < step <= version + 1 + k}
            assert max(0, made.steps_ahead(version, shipped)) == len(meant_for)
            is_late = not any(step > shipped for step in range(version + 2 + k))
            assert (version < made.on_time(shipped)) is is_late
        for step in range(version + 1, version + 20):
            assert (version <= made.last_chance(step)) is (step + 1 - 1 - version > limit), "too old for the next step"


@pytest.mark.parametrize(
    ("made", "waits", "grows", "leaves"),
    [
        (rule(1, 8), False, True, Stage.STALE),
        (rule(1, 8, 1.5), False, True, Stage.STALE),
        (rule(1, 1), True, True, Stage.STALE),
        (rule(1, 1, 1.5), False, False, Stage.SURPLUS),
        (rule(0, 8), True, True, Stage.STALE),
        (rule(0, 8, 1.5), False, False, Stage.SURPLUS),
        (rule(2, 8, strict=True), True, True, Stage.STALE),
        (rule(2, 8, 1.5, strict=True), False, False, Stage.SURPLUS),
    ],
)
def test_the_table_of_the_rule(made, waits, grows, leaves):
    step, last_chance = 20, made.last_chance(20)
    assert made.awaited(step) == (last_chance if waits else float("-inf"))
    assert made.included(step) == (last_chance if grows else float("-inf"))
    assert (made.left_behind(step).stage, made.left_behind(step).last_chance) == (leaves, last_chance)
    assert (made.left_behind(100).stage, made.left_behind(100).last_chance) == (Stage.SURPLUS, float("inf"))


# --- whole runs -------------------------------------------------------------------------------------------------------


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer whenever there is nothing else to do."""

    def __init__(self):
        self.now = 0.0
        super().__init__(SkippingSelector(self))

    def time(self):
        return self.now


class SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self.loop = loop

    def select(self, timeout=None):
        assert timeout is not None, "everybody waits for somebody else"
        self.loop.now += max(0.0, timeout)
        return super().select(0)


class Credits(Algorithm):
    def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(1.0)


class Run:
    """A run of the real orchestrator. A group takes `duration(its number)` seconds; `fails()` says whether one fails.

    A rollout is four tokens, three of them sampled. `more_s` are seconds by group size that groups take in addition.
    """

    def __init__(
        self, made, *, steps, duration, trainer_s, sizes=(2,), fails=lambda: False, more_s=(), batch_size=8, **options
    ):
        self.monkeypatch, make_env, self.make_rollout, make_orchestrator, self.pool = made
        self.loop = SkippingLoop()
        self.starts, self.ends, self.dropped, self.recorded, self.shipped, self.lines = {}, [], [], [], {}, []
        self.duration, self.trainer_s, self.steps = duration, trainer_s, steps
        self.fails, self.end_of, self.more_s = fails, {}, dict(more_s)
        self.pool.version = 0
        self.pool.update_weights = self.update_weights
        envs = [make_env(f"e{size}", group_size=size, algorithm=Credits) for size in sizes]
        for env in envs:
            env.environment.play = self.play
        limits = {"batch_timeout_s": 200, "policy_timeout_s": 200, "max_error_share": 0.9}
        monitors = SimpleNamespace(step=self.lines.append)
        self.orchestrator = make_orchestrator(envs, monitors, steps, batch_size=batch_size, **limits | options)
        self.transport = self.orchestrator.weight_sync.transport
        self.config, self.rule = self.orchestrator.weight_sync.config, self.orchestrator.staleness
        self._watch(self.monkeypatch)
        try:
            self.loop.run_until_complete(self._run())
        finally:
            self.loop.close()

    async def play(self, task, n, sampler, *, group_id, arrived):
        version, env_name = self.pool.version, f"e{n}"
        failing = self.fails()
        await asyncio.sleep(self.duration(group_id) + self.more_s.get(n, 0.0))
        rollouts = []
        for index in range(n):
            rollout = self.make_rollout(1.0, env=env_name, version=version, group=group_id)
            rollout.index, rollout.end_version = index, self.pool.version
            if failing and index % 2 == 0:
                rollout.leave(Stage.FAILED, "ValueError: no", "env")
            rollouts.append(rollout)
            await arrived(rollout)
        return rollouts

    async def update_weights(self, version, path, timeout_s):
        assert version > self.pool.version
        await asyncio.sleep(0.1)
        self.pool.version = version

    async def _train(self):
        for step in range(1, self.steps + 1):
            while self.transport.receive_batch(step, 0) is None:
                await asyncio.sleep(0.1)
            await asyncio.sleep(self.trainer_s())
            self.transport.publish(step, {"tokens/trained": 60.0})

    async def _run(self):
        training = asyncio.create_task(self._train())
        await self.orchestrator.run()
        await training
        self.took = self.loop.time()

    def _watch(self, monkeypatch):
        """Note every start and end of a group, every record and every shipment, with the time."""
        own, dispatcher = self.orchestrator, self.orchestrator.dispatcher
        start, admit, drop, ship = dispatcher.start_group, own.intake.admit, dispatcher.drop, own.steps.ship

        def start_group(context):
            before, under_way = set(dispatcher.in_flight), own.collector.rollouts_on_time + own.batcher.rollouts
            started = start(context)
            for group in set(dispatcher.in_flight) - before:
                version, shipped = self.pool.version, own.steps.shipped
                assert group.start_version == version and not own.weight_sync.busy
                steps = range(shipped + 1, min(self.steps, version + 1 + self.config.max_async_level) + 1)
                assert steps, "no step to be meant for"
                most = self.config.oversampling_factor * (self.config.batch_size or 0) * len(steps)
                assert self.config.batch_size is None or under_way < most, "more than these steps take"
                self.starts[group] = self.loop.time()
            return started

        def admitted(group):
            self.ends.append(group)
            self.end_of[group] = self.loop.time()
            return admit(group)

        def dropped(last_chance):
            before = set(dispatcher.in_flight)
            count = drop(last_chance)
            self.dropped += (cancelled := before - set(dispatcher.in_flight))
            self.end_of |= dict.fromkeys(cancelled, self.loop.time())
            return count

        def shipping(step, line):
            self.shipped[step] = self.loop.time()
            ship(step, line)

        monkeypatch.setattr("prl.orchestrator.weight_sync.POLL_S", 0.1)
        monkeypatch.setattr(dispatcher, "start_group", start_group)
        monkeypatch.setattr(own.intake, "admit", admitted)
        monkeypatch.setattr(dispatcher, "drop", dropped)
        monkeypatch.setattr(own.steps, "ship", shipping)
        monkeypatch.setattr(
            "prl.orchestrator.next_step.write_records",
            lambda run_dir, step, rollouts: self.recorded.extend((step, rollout) for rollout in rollouts),
        )

    @property
    def ages(self):
        """Of the trained rollouts, in versions."""
        return [step - 1 - r.start_version for step, r in self.recorded if r.stage is Stage.TRAINED]

    def total(self, key):
        return sum(line.get(key, 0.0) for line in self.lines)


@pytest.fixture
def run(monkeypatch, make_env, make_rollout, make_orchestrator, pool, tmp_path):
    def start(**how):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        return Run((monkeypatch, make_env, make_rollout, make_orchestrator, pool), **how)

    return start


def check(run):
    """What holds of every run, whatever takes how long."""
    limit = run.config.age_limit
    assert sorted(run.shipped) == [line["step"] for line in run.lines[1:]] == list(range(1, run.steps + 1))
    assert max(run.ages) <= limit, "nothing trains that is older than the limit"
    if run.config.strict_async_level:
        assert all(
            step - 1 - r.start_version == min(limit, step - 1) for step, r in run.recorded if r.stage is Stage.TRAINED
        )
    assert len(run.ends) == len(set(run.ends)) and len(run.dropped) == len(set(run.dropped))
    assert not set(run.ends) & set(run.dropped) and {*run.ends, *run.dropped} == {*run.starts}, "each ends once"
    arrived = [rollout for group in run.ends for rollout in group.rollouts]
    assert len(run.recorded) == len(arrived) and {id(r) for _, r in run.recorded} == set(map(id, arrived))
    assert all(rollout.outcome is not None for rollout in arrived), "each with an outcome"
    assert not run.orchestrator.dispatcher.in_flight and not run.orchestrator.batcher.groups
    kept = run.rule.keeps_stragglers or run.config.oversampling_factor == 1
    if kept and not run.rule.keeps_stragglers:
        assert run.total("off_policy/dropped") == 0, "what is waited for does not grow too old"
    if not kept:
        assert run.total("off_policy/dropped") == 0 and all(age <= run.config.max_async_level for age in run.ages)
    cancelled = sum(group.env.rollouts_per_group for group in run.dropped)
    left = sum(r.stage in (Stage.STALE, Stage.SURPLUS) for r in arrived)
    assert run.total("off_policy/dropped") + run.total("rollouts/surplus") == cancelled + left


@pytest.mark.parametrize("seed", range(12))
def test_invariants_hold_in_any_run(run, seed):
    draw = random.Random(seed)
    k = draw.randrange(4)
    failing = draw.choice([0.0, 0.0, 0.2])
    slow, share = draw.choice([3, 30]), draw.choice([0.0, 0.02, 0.2, 0.6])
    speed = draw.choice([0.05, 1.0, 5.0])
    tokens = draw.random() < 0.2
    made = run(
        steps=draw.randrange(5, 16),
        duration=lambda group: slow if draw.random() < share else draw.random(),
        trainer_s=lambda: speed * draw.random(),
        sizes=draw.choice([(2,), (4,), (8,), (1, 3), (2, 8), (16,), (1, 2, 3)]),
        more_s={1: draw.choice([0, 4]), 8: draw.choice([0, 4])},
        mix=draw.choice(["weights", "weights", "arrival"]),
        max_async_level=k,
        max_off_policy_steps=k + draw.choice([0, 1, 2, 6]),
        strict_async_level=draw.random() < 0.2,
        oversampling_factor=draw.choice([1.0, 1.0, 1.25, 2.0]),
        batch_size=None if tokens else 8,
        token_batch_size=32 if tokens else None,
        fails=lambda: draw.random() < failing,
    )
    check(made)


@pytest.mark.parametrize(
    ("k", "limit", "factor", "longest", "age", "dropped"),
    [
        (0, 0, 1.0, (30, 31), 0, {}),  # step 1 waits: no other may train it
        (1, 1, 1.0, (28, 30), 1, {}),  # step 1 does not wait, and step 2 does
        (2, 2, 1.0, (26, 30), 2, {}),
        (1, 8, 1.0, (0, 3), None, {9: "off_policy/dropped"}),  # 9 - 1 - 8 = 0: the last step that may train it
        (1, 3, 1.0, (0, 3), None, {4: "off_policy/dropped"}),
        (1, 3, 1.5, (0, 3), None, {4: "off_policy/dropped"}),
        (1, 1, 1.5, (0, 3), None, {2: "rollouts/surplus"}),
        (0, 0, 1.5, (0, 3), None, {1: "rollouts/surplus"}),
        (1, 30, 1.0, (0, 3), "late", {}),
    ],
)
def test_one_rollout_of_thirty_seconds_among_those_of_one(run, k, limit, factor, longest, age, dropped):
    """It is the first to start; each batch has four groups. The trainer takes a second, too."""
    made = run(
        steps=30,
        duration=lambda group: 1.0 if group else 30.0,
        trainer_s=lambda: 1.0,
        max_async_level=k,
        max_off_policy_steps=limit,
        oversampling_factor=factor,
    )
    check(made)
    times = [0.0, *made.shipped.values()]
    least, most = longest
    assert least <= max(after - before for before, after in pairwise(times)) + 1e-6 <= most + 1e-6
    ages = tuple(step - 1 for step, r in made.recorded if r.group_id == 0 and r.stage is Stage.TRAINED)
    if age == "late":  # it trains in the first batch that is cut after it has arrived
        assert len(ages) == 2 and ages[0] == ages[1] > k
        assert made.shipped[ages[0]] <= 30.0 <= made.shipped[ages[0] + 1]
    else:
        assert ages == (() if age is None else (age, age))
    lost = {line["step"]: key for line in made.lines for key in LOST if line.get(key) and line["step"] in dropped}
    assert lost == dropped
    if limit > k:
        assert made.total("off_policy/dropped") == 2 * len(dropped)


LOST = ("off_policy/dropped", "rollouts/surplus")


def test_stragglers_do_not_starve_the_steps_after_them(run):
    """Every fourth group takes a minute: with k = 1 there are places for eight, which would soon be theirs."""
    made = run(
        steps=30,
        duration=lambda group: 60.0 if group % 4 == 3 else 1.0,
        trainer_s=lambda: 1.0,
        max_async_level=1,
        max_off_policy_steps=4,
    )
    check(made)
    assert made.shipped[29] < 70 and made.total("off_policy/dropped") > 40
    most_in_flight = max(
        sum(start <= at < made.end_of[group] for group, start in made.starts.items()) for at in made.starts.values()
    )
    assert most_in_flight <= 2 * 4 + 4 * 2, "two batches on time, and what is slow of the versions before, two of each"


def test_late_groups_replace_new_ones(run):
    """Stragglers of a third of the groups, all of which train: no batch grows, and nothing piles up."""
    made = run(
        steps=40,
        duration=lambda group: 1.0 if group % 3 else 4.5,
        trainer_s=lambda: 1.0,
        max_async_level=1,
        max_off_policy_steps=12,
    )
    check(made)
    assert made.total("off_policy/dropped") == 0 and max(made.ages) > 1
    assert {line["rollouts/batch"] for line in made.lines[1:]} == {8.0}
    assert len(made.starts) <= 40 * 4 + 3 * 4, "a group trains or is among the last"


# --- the mix of envs --------------------------------------------------------------------------------------------------


def shares(made, size):
    return [line[f"batch/e{size}/share"] for line in made.lines[1:]]


@pytest.mark.parametrize("tokens", [False, True])
def test_batches_mix_envs_by_weight_from_the_first(run, tokens):
    """Both envs have half of what is started; the groups of one take five seconds, those of the other one."""

    def start(mix):
        made = run(
            steps=12,
            duration=lambda group: 1.0,
            trainer_s=lambda: 1.0,
            sizes=(2, 4),
            more_s={4: 4.0},
            mix=mix,
            batch_size=None if tokens else 32,
            token_batch_size=128 if tokens else None,
            max_async_level=1 if tokens else 2,
        )
        check(made)
        assert all(fast + slow == pytest.approx(1.0) for fast, slow in zip(shares(made, 2), shares(made, 4)))
        return shares(made, 2)

    by_weight, by_arrival = start("weights"), start("arrival")
    assert max(by_weight) <= 0.65 and min(by_weight) >= 0.35
    assert by_arrival[0] == 1.0
    assert tokens or sum(by_weight) == pytest.approx(6.0, abs=0.5), "over the run the share by weight"


def test_slow_env_is_waited_for_without_its_straggler(run):
    """Step 1 waits for groups of ten seconds, which are for it. One takes a hundred, and is soon late."""
    made = run(
        steps=8,
        duration=lambda group: 100.0 if group == 1 else 1.0,
        trainer_s=lambda: 1.0,
        sizes=(2, 4),
        more_s={4: 9.0},
        batch_size=16,
        max_async_level=1,
        max_off_policy_steps=8,
    )
    check(made)
    assert made.shipped[1] > 9.9 and shares(made, 4)[0] == 0.5
    assert made.shipped[8] < 100.0
