"""Replay: which groups of earlier batches a step trains on again, and that a run which goes on takes the same."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from prl.base.checkpoint_folders import STATE, checkpoint_path
from prl.config.schema import CheckpointConfig
from prl.curriculum.replay import ReplayConfig
from prl.orchestrator.batcher import Batcher
from prl.orchestrator.replay import Replay
from prl.orchestrator.state import BatcherState, RunState, decode, encode
from prl.orchestrator.types import Group
from prl.rollouts.inputs import Picture
from prl.rollouts.rollout import Stage


@pytest.fixture
def make_group(make_rollout, make_env):
    """`make_group(7, env, version=2)`: a group of two rollouts of four tokens that was trained on."""

    def make(number, env, *, version=0, credit=1.0, left=Stage.TRAINED):
        rollouts = [make_rollout(version=version, advantages=credit) for _ in range(2)]
        for rollout in rollouts:
            rollout.leave(left)
        return Group(number, env, version, None, rollouts)

    return make


def ids(replay, step):
    return [group.id for group in replay._chosen(step)]


def test_newest_first_while_young_unused_and_with_a_signal(make_env, make_group):
    env = make_env(curriculum={"replay": ReplayConfig(share=0.5, max_age=3, max_uses=2)})
    replay = Replay([env], Batcher(8, None), age_limit=8)
    groups = [make_group(1, env), make_group(2, env, version=1), make_group(3, env), make_group(4, env, credit=0.0)]
    assert replay.take(2, [*groups, make_group(5, env, version=1, left=Stage.POST_FILTERED)]) == []
    assert [group.id for group in replay.groups] == [2, 3, 1], "of one version the later ones first"
    assert replay.room(3) == 4 and ids(replay, 3) == [2, 3], "four rollouts of eight"
    assert replay.take(3, [make_group(6, env, version=2)]) == groups[1].rollouts + groups[2].rollouts
    assert ids(replay, 4) == [6, 2] and replay.metrics([]) == {
        **{"replay/rollouts": 0, "replay/share": 0.0, "replay/kept": 4},
    }
    replay.take(4, [])
    assert ids(replay, 5) == [6] and ids(replay, 6) == [6], "2 has been used twice, 3 and 1 started four versions ago"
    assert ids(replay, 7) == [] and replay.room(7) == 8


def test_a_run_that_goes_on_makes_pictures_again_and_leaves_out_those_that_are_gone(make_env, make_group):
    env, asked = make_env(curriculum={"replay": ReplayConfig(share=0.5)}), []

    def seen(digest):
        asked.append(digest)
        if digest == "gone":
            raise ValueError("it is not in the store")

    env.sampler = SimpleNamespace(renderer=SimpleNamespace(pictures=SimpleNamespace(seen=seen)))
    groups = [make_group(number, env) for number in range(3)]
    for group, digest in zip(groups[1:], ("there", "gone"), strict=True):
        group.rollouts[0].samples[0].pictures = [Picture(0, 1, digest, 4, 4, "f")]
    replay, batcher = Replay([env], Batcher(8, None), 8), Batcher(8, None)
    replay.groups = groups
    state = decode(encode(RunState(1, replay=replay.state_dict())), "state").replay
    replay.load_state_dict(state, {env.name: env})
    batcher.load_state_dict(BatcherState(state), {env.name: env})
    assert [group.id for group in replay.groups] == [group.id for group in batcher.groups] == [0, 1]
    assert asked == ["there", "gone"] * 2


def test_age_limit_of_the_run_holds(make_env, make_group):
    env = make_env(curriculum={"replay": ReplayConfig(share=0.5, max_age=9)})
    replay = Replay([env], Batcher(8, None), age_limit=2)
    replay.take(1, [make_group(1, env)])
    assert ids(replay, 3) == [1] and ids(replay, 4) == []


def test_shares_are_of_each_env_and_of_tokens(make_env, make_group):
    """Of 64 tokens env a, with 3/4 of the weight, replays half of 48; env b none. A group has 8."""
    a = make_env("a", weight=3.0, curriculum={"replay": ReplayConfig(share=0.5)})
    b = make_env("b")
    replay = Replay([a, b], Batcher(None, 64), age_limit=8)
    replay.take(1, [make_group(number, env) for number, env in enumerate([a, b, a, a, a, b])])
    assert ids(replay, 2) == [4, 3, 2] and replay.room(2) == 64 - 24


def test_a_share_of_less_than_a_group_is_a_group_in_some_steps(make_env, make_group):
    """.2 of 16 rollouts are 3.2, a group has 2: 8 groups in 5 steps. A weight counts from the next step on."""
    a = make_env("a", curriculum={"replay": ReplayConfig(share=0.2)})
    b = make_env("b")
    a.weight, b.weight = 1.0, 0.0
    replay = Replay([a, b], Batcher(16, None), age_limit=99)
    unit = a.rollouts_per_group
    assert sum(replay._budget("a", step) for step in range(1, 101)) == unit * int(0.2 * 16 / unit * 100 + 1e-9)
    b.weight = 1.0
    replay.room(1)
    assert sum(replay._budget("a", step) for step in range(1, 101)) == unit * int(0.1 * 16 / unit * 100 + 1e-9)


def groups_of(rows):
    return [origin.group for row in rows for origin in row.origins if origin]


async def test_batches_keep_their_size_and_replay_what_was_stamped(train, make_env):
    env = make_env(curriculum={"replay": ReplayConfig(share=0.5, max_age=2)})
    run = await train([env], steps=8)
    assert run.sizes == [8] * 8
    seen, again = {}, 0
    for rows, line in zip(run.rows, run.lines, strict=True):
        replayed = 0
        for row in rows:
            start = 0
            for length, origin in zip(row.sequence_lengths, row.origins, strict=True):
                key = (origin.group, origin.rollout)
                tokens = (row.input_ids[start : start + length], row.advantages[start : start + length])
                start += length
                if key in seen:
                    assert tokens == seen[key]
                    replayed += 1
                seen[key] = tokens
        assert line["replay/rollouts"] == replayed and line["replay/share"] == replayed / 8
        assert line["rollouts/batch"] == 8 - replayed and line["off_policy/max"] <= 2
        again += replayed
    assert again >= 4 * 5 and len(run.trained()) == sum(run.sizes) - again, "recorded once"


async def test_run_that_goes_on_replays_the_same(make_orchestrator, make_trainer, make_env, pool, tmp_path):
    options = {"checkpoint": CheckpointConfig(every=1, keep_last=None), "max_off_policy_steps": 6}
    replaying = {"replay": ReplayConfig(share=0.5, max_uses=2)}
    monitors = SimpleNamespace(step=lambda line: None, status=lambda text: None)
    run = make_orchestrator([make_env(curriculum=replaying)], monitors, 6, **options)
    pool.delay, trainer = 0.004, make_trainer(delay=0.004, stop_after=6)
    async with asyncio.timeout(20):
        await asyncio.gather(run.run(), trainer.work())
    run.finish()
    shipped = [{group for row in ranks[0].micro_batches for group in groups_of([row])} for ranks in trainer.batches]
    for step in range(2, 6):
        path = checkpoint_path(tmp_path, step) / STATE / "run.msgpack"
        state = decode(path.read_bytes(), path)
        again = make_orchestrator([make_env(curriculum=replaying)], monitors, 6, state=state, **options)
        chosen = ids(again.replay, step + 1)
        assert chosen and set(chosen) == shipped[step] & set().union(*shipped[:step])
        assert again.replay.room(step + 1) == 4 and math.isfinite(again.replay.groups[0].start_version)
        for saved, group in zip(state.replay, again.replay.groups, strict=True):
            assert saved.uses == group.uses
            assert [rollout.samples for rollout in group.rollouts] == [kept.samples for kept in saved.rollouts]
