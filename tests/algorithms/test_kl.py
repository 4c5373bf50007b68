"""`algo.kl`: any rl algorithm's tokens feed `ref_kl` too, with the initial or a frozen model as the reference."""

from collections.abc import Callable

import pytest

from prl.algorithms.base import Algorithm
from prl.algorithms.custom import CustomAlgorithm
from prl.algorithms.echo import EchoAlgorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.max_rl import MaxRLAlgorithm
from prl.algorithms.reference import KLConfig
from prl.algorithms.reward import RewardAlgorithm
from prl.base.errors import ConfigError
from prl.config.model_reference import FrozenModelConfig
from prl.rollouts.components import COMPONENTS
from prl.rollouts.messages import Reference
from prl.rollouts.packing import pack

BIG = FrozenModelConfig(name="big", base_url="http://a/v1", timeout_s=9.0)
INITIAL = Reference("initial")
MAKE: list[Callable[..., Algorithm]] = [
    GRPOAlgorithm,
    MaxRLAlgorithm,
    RewardAlgorithm,
    EchoAlgorithm,
    lambda **options: CustomAlgorithm(fn=lambda group: [1.0] * len(group), **options),
]


@pytest.fixture
def group(new_talk, user, tool, call):
    """Two rollouts with an observation between two turns."""

    def make(reward):
        talk = new_talk()
        talk.turn([*talk.turn([user("2+2=")], call), tool("four")], "4")
        return talk.rollout(reward)

    return lambda: [make(1.0), make(0.0)]


def shipped(rollouts):
    return [sample for rollout in rollouts for sample in rollout.samples]


@pytest.mark.parametrize("make", MAKE)
async def test_kl_weighs_the_rl_tokens_and_changes_nothing_else(group, play, make):
    plain = shipped(await play(make(), group()))
    pulled = shipped(await play(make(kl=KLConfig(coef=0.25)), group()))
    for before, after in zip(plain, pulled, strict=True):
        assert before.ref_kl_weights is None and before.reference == Reference()
        assert after.ref_kl_weights == [0.25 * trains for trains in after.mask] and after.reference == INITIAL
        for name in ("advantages", "rl_weights", "ce_weights", "ref_logprobs"):
            assert getattr(after, name) == getattr(before, name), name
    assert any(sample.ce_weights for sample in pulled) == (make is EchoAlgorithm)
    rows, _ = pack(pulled, 256, 1)
    assert [row.references for row in rows[0]] == [[INITIAL] * len(row.sequence_lengths) for row in rows[0]]


async def test_tokens_without_rl_weight_have_no_kl(make_rollout, play):
    class Half(RewardAlgorithm):
        async def score_rollout(self, rollout):
            await super().score_rollout(rollout)
            rollout.samples[0].rl_weights = [1.0, 0.0, 2.0, 1.0]

    (rollout,) = await play(Half(kl=KLConfig(coef=0.5)), [make_rollout(1.0)])
    assert rollout.samples[0].ref_kl_weights == [0.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize("make", MAKE)
async def test_a_frozen_reference_scores_by_prefill(frozen, attached, group, make):
    algorithm = attached(make(kl=KLConfig(coef=0.5, reference=BIG)))
    await algorithm.start()
    (big,) = frozen
    assert big.config is BIG and algorithm.pools == [big], "the run waits for every model in `pools`"
    rollouts = group()
    for rollout in rollouts:
        await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group(rollouts)
    for sample in shipped(rollouts):
        assert sample.ref_logprobs == big.logprobs(sample.token_ids) and sample.reference == Reference()
        assert sample.ref_kl_weights == [0.5 * trains for trains in sample.mask]


def test_a_class_that_feeds_another_loss_cannot_have_kl():
    with pytest.raises(ConfigError, match=r"algo\.kl\.coef=0\.5: Imitates feeds the ce loss, and the KL is added to"):
        KLConfig(coef=0.5).check("algo.kl", "Imitates", "ce")


async def test_algorithm_that_writes_ref_kl_weights_cannot_have_kl(make_rollout, play):
    class Own(RewardAlgorithm):
        async def score_rollout(self, rollout):
            await super().score_rollout(rollout)
            rollout.samples[0].ref_kl_weights = [0.0, 0.0, 0.0, 1.0]

    with pytest.raises(ValueError, match=r"writes ref_kl_weights itself: its kl\.coef must be 0"):
        await play(Own(kl=KLConfig(coef=0.5)), [make_rollout()])


def test_beside_a_sample_that_brings_its_reference(make_sample):
    """Each keeps its own source in the packed row; one with neither is refused as ever."""
    weights = [0.0, 1.0, 1.0, 1.0]
    mine = make_sample(advantages=weights, ref_kl_weights=weights, reference=INITIAL)
    brought = make_sample(rl_weights=[0.0] * 4, ref_kl_weights=weights, ref_logprobs=[0.0, -1.0, -2.0, -3.0])
    plain = make_sample(advantages=weights)
    ((row,),), _ = pack([mine, brought, plain], 12, 1)
    assert row.references == [INITIAL, Reference(), Reference()]
    assert row.ref_logprobs == [0.0] * 4 + [0.0, -1.0, -2.0, -3.0] + [0.0] * 4
    assert row.ref_kl_weights == weights * 2 + [0.0] * 4
    ((row,),), _ = pack([brought, plain], 12, 1)
    assert row.references == []
    mine.reference = Reference()
    assert mine.feeds(COMPONENTS["ref_kl"])
    with pytest.raises(ValueError, match="env 'toy': a sample feeds the ref_kl loss but has no ref_logprobs.*opd and"):
        pack([mine, brought], 12, 1)
