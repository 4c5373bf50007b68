"""Reference scoring: every sample verbatim, so many at a time, and a reference that fails costs one rollout."""

import asyncio

import msgspec
import pytest

from prl.algorithms.opd import OPDAlgorithm
from prl.algorithms.reference import ReferenceLogprobs
from prl.base.errors import EngineError
from prl.config.model_reference import FrozenModelConfig
from prl.rollouts.messages import MicroBatch, Reference
from prl.rollouts.packing import pack

TEACHER = FrozenModelConfig(name="big", base_url="http://a/v1", timeout_s=9.0)


@pytest.fixture
async def opd(frozen, attached):
    """An algorithm that is set up, and its teacher."""

    async def make(**settings):
        algorithm = OPDAlgorithm(teacher=TEACHER, **settings)
        attached(algorithm)
        await algorithm.setup()
        return algorithm, frozen[-1]

    return make


async def test_every_sample_is_scored_verbatim(opd, make_rollout, make_sample):
    algorithm, teacher = await opd()
    rollout = make_rollout()
    rollout.samples = [make_sample(5, start=10), make_sample(3, start=70), make_sample(1, prompt=0, start=90)]
    await algorithm.finalize_rollout(rollout)
    assert sorted(teacher.asked) == [[10, 11, 12, 13, 14], [70, 71, 72], [90]]
    assert [s.ref_logprobs for s in rollout.samples] == [teacher.logprobs(s.token_ids) for s in rollout.samples]
    assert [s.ref_logprobs[0] for s in rollout.samples] == [0.0] * 3


async def test_context_is_scored_in_front_and_cut_off_again(reference, make_rollout):
    rollout = make_rollout(lengths=(4, 2))
    await ReferenceLogprobs(reference, 4).compute(rollout, context=(900, 901, 902))
    assert sorted(reference.asked) == [[900, 901, 902, 0, 1], [900, 901, 902, 0, 1, 2, 3]]
    for sample in rollout.samples:
        whole = reference.logprobs([900, 901, 902, *sample.token_ids])
        assert sample.ref_logprobs == whole[3:] and sample.ref_logprobs[0] != 0.0


@pytest.mark.parametrize("limit", [1, 7, 32])
async def test_so_many_requests_are_in_flight_and_no_more(opd, make_rollout, limit):
    algorithm, teacher = await opd(max_concurrent=limit)
    rollouts = [make_rollout(lengths=(4, 3, 2)) for _ in range(40)]
    await asyncio.gather(*(algorithm.finalize_rollout(rollout) for rollout in rollouts))
    assert teacher.most_in_flight == limit and len(teacher.asked) == 3 * 40
    assert all(len(s.ref_logprobs) == len(s.token_ids) for rollout in rollouts for s in rollout.samples)


async def test_a_teacher_that_fails_costs_just_that_rollout(opd, make_rollout, make_sample):
    algorithm, teacher = await opd(max_concurrent=3)
    teacher.failing = {1000}
    rollouts = [make_rollout() for _ in range(40)]
    for rollout in rollouts[::10]:
        rollout.samples = [make_sample(4, start=1000)]
    await asyncio.gather(*(algorithm.finalize_rollout(rollout) for rollout in rollouts))
    assert [i for i, rollout in enumerate(rollouts) if rollout.error is not None] == [0, 10, 20, 30]
    assert rollouts[0].error == "EngineError: no answer" and rollouts[0].samples[0].ref_logprobs is None
    assert all(0 < rollout.scoring_s < 10 for rollout in rollouts), "failed or not, it took its time"
    assert teacher.most_in_flight == 3
    await algorithm.finalize_group(rollouts)
    assert [r.samples[0].ref_kl_weights for r in rollouts[:2]] == [None, [0.0, 1.0, 1.0, 1.0]]


async def test_failed_request_cancels_the_rest_of_its_rollout(reference, make_rollout, make_sample):
    reference.failing = {1000}
    rollout = make_rollout()
    rollout.samples = [make_sample(start=1000), *(make_sample() for _ in range(20))]
    with pytest.raises(EngineError):
        await ReferenceLogprobs(reference, 1).compute(rollout)
    asked = len(reference.asked)
    await asyncio.sleep(0.1)
    assert len(reference.asked) == asked


async def test_with_a_divergence_the_teachers_most_likely_tokens_are_shipped(opd, make_rollout):
    algorithm, teacher = await opd(divergence="jsd", beta=0.2, top_k=3)
    rollout = make_rollout(lengths=(3,))
    await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group([rollout])
    (sample,) = rollout.samples
    assert sample.ref_logprobs == teacher.logprobs(sample.token_ids)
    assert sample.top_ids == [[0, 1, 2], [1, 2, 3], [2, 3, 4]] and sample.top_logprobs[1] == [-2.0, -3.0, -4.0]
    assert sample.reference == Reference("", "jsd", 0.2)
    [[row]], _ = pack([sample], 5, 1)
    assert row.references == [sample.reference]
    assert row.top_ids == [[], [1, 2, 3], [2, 3, 4], [], []], "of members alone"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=MicroBatch) == row


@pytest.mark.parametrize(("teacher", "name"), [("initial", "initial"), ("ema", "ema:0.5"), ("lagged", "lagged:3")])
async def test_a_teacher_in_the_trainer_scores_no_rollout_here(attached, play, make_rollout, teacher, name):
    algorithm = attached(OPDAlgorithm(teacher=teacher, decay=0.5, every=3, divergence="forward_kl"))
    (rollout,) = await play(algorithm, [make_rollout()])
    (sample,) = rollout.samples
    assert sample.reference == Reference(name, "forward_kl") and algorithm.trainer_references() == {name}
    assert sample.ref_logprobs is None and pack([sample], 5, 1)[0][0][0].ref_kl_weights == [0.0, 1.0, 1.0, 1.0, 0.0]
    with pytest.warns(UserWarning, match=f"algo.teacher={teacher}: the policy begins as its teacher"):
        OPDAlgorithm(teacher=teacher).check("algo")
