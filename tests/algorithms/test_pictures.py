"""Rollouts with pictures: every algorithm leaves them where they are, and whoever scores a rollout sees them."""

import pytest

from prl.algorithms.custom import CustomAlgorithm
from prl.algorithms.echo import EchoAlgorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.max_rl import MaxRLAlgorithm
from prl.algorithms.opd import OPDAlgorithm
from prl.algorithms.opsd import OPSDAlgorithm
from prl.algorithms.reference import KLConfig
from prl.algorithms.reinforce_pp import ReinforcePPAlgorithm
from prl.algorithms.reward import RewardAlgorithm
from prl.algorithms.sft import SFTDistillAlgorithm
from prl.algorithms.turn import TurnAlgorithm
from prl.config.model_reference import FrozenModelConfig
from prl.models import model_path
from prl.rollouts.inputs import Picture
from prl.rollouts.packing import pack
from prl.rollouts.rollout import Stage

TEACHER = FrozenModelConfig(name="big", base_url="http://a/v1", tokenizer=str(model_path("tiny")))
SHOWN = Picture(2, 3, "ab" * 32, 48, 48, "cd" * 32)
HINTED = {"demonstration": "four"}


@pytest.fixture
def group(new_talk, user, tool, call):
    """Two rollouts of two turns, a picture in the prompt, and another in a tool's answer."""

    def make():
        rollouts = []
        for reward in (0.0, 1.0):
            talk = new_talk()
            talk.turn([*talk.turn([user("what is it?")], call), tool("a long answer of the tool")], "hello")
            rollout = talk.rollout(reward)
            rollout.trace.info = HINTED
            (sample,) = rollout.samples
            answer = len(talk.sent[1].prompt) - 30
            sample.pictures = [SHOWN, Picture(answer, 4, "ef" * 32, 32, 48, "01" * 32)]
            rollouts.append(rollout)
        return rollouts

    return make


ALGORITHMS = [
    GRPOAlgorithm(),
    GRPOAlgorithm(kl=KLConfig(coef=0.1, reference=TEACHER)),
    MaxRLAlgorithm(),
    ReinforcePPAlgorithm(),
    TurnAlgorithm(),
    RewardAlgorithm(),
    EchoAlgorithm(),
    SFTDistillAlgorithm(),
    CustomAlgorithm(fn=lambda group: [1.0] * len(group)),
    OPDAlgorithm(teacher=TEACHER),
    OPDAlgorithm(teacher=TEACHER, divergence="jsd", top_k=2),
    OPSDAlgorithm(),
    OPSDAlgorithm(reference="initial"),
]


async def played(algorithm, rollouts):
    """The rollouts as the pipeline leaves them."""
    await algorithm.start()
    for rollout in rollouts:
        await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group(rollouts)
    algorithm.finalize_batch([rollouts])
    return rollouts


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
async def test_pictures_stay_and_their_placeholders_never_train(algorithm, attached, frozen, reference, group):
    rollouts = await played(attached(algorithm), group())
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    for sample in samples:
        for picture in sample.pictures:
            places = slice(picture.start, picture.stop)
            weights = [getattr(sample, f"{name}_weights") or [0.0] * picture.stop for name in ("ce", "ref_kl")]
            assert not any(sample.mask[places]) and not any(any(each[places]) for each in weights)
    if isinstance(algorithm, EchoAlgorithm):
        assert sum(samples[0].ce_weights) > 0, "the rest of the tool's answer trains"
    [[row]], _ = pack(samples, 512, 1)
    assert [picture.digest for picture in row.pictures] == ["ab" * 32, "ef" * 32] * 2
    asked = reference.inputs + [sequence for pool in frozen for sequence in pool.inputs]
    ends = [sequence.keys[-len(samples[0].token_ids) :] for sequence in asked]
    assert ends == [sample.input.keys for sample in samples][: len(ends)]
    scores = isinstance(algorithm, OPDAlgorithm | OPSDAlgorithm) or getattr(algorithm, "kl", KLConfig()).coef
    assert len(ends) == (2 if scores and getattr(algorithm, "reference", "") != "initial" else 0)


async def test_a_hint_moves_the_pictures(attached, reference, group):
    [first, _] = await played(attached(OPSDAlgorithm()), group())
    (sample,) = first.samples
    hint = len(reference.asked[0]) - len(sample.token_ids)
    assert hint > 0 and reference.inputs[0] == sample.input.behind(reference.asked[0][:hint])
    assert reference.inputs[0].pictures[0].start == hint + SHOWN.start


async def test_text_alone_is_not_compared_with_pictures(attached, frozen, group):
    rollouts = await played(attached(OPDAlgorithm(teacher=TEACHER, align="text")), group())
    assert {rollout.outcome.stage for rollout in rollouts} == {Stage.FAILED} and not frozen[0].inputs
    assert "algo.align=text compares texts alone" in rollouts[0].outcome.reason
