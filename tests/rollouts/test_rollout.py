"""Samples of real traces: what is trained, once, and with whose logprobs."""

import pytest

from prl.rollouts.messages import Origin
from prl.rollouts.rollout import Outcome, Rollout, Stage
from prl.rollouts.samples import samples_of


def samples(talk):
    return [sample for sample, _ in samples_of(talk.trace, env_name="toy", temperature=0.7, live=True)]


def trained(sample):
    return [t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m]


def trained_logprobs(sample):
    return [x for x, m in zip(sample.logprobs, sample.mask, strict=True) if m]


@pytest.fixture
def rollout(talk, user):
    talk.turn([user("1+1=")], "12")
    made = Rollout(talk.trace, env_name="toy", group_id=0, start_version=4, temperature=0.7)
    made.attach_samples()
    return made


def test_one_turn_is_its_prompt_and_completion(talk, user):
    talk.turn([user("1+1=")], "2")
    talk.trace.record_reward("answer", 0.75)
    (sample,), (call,) = samples(talk), talk.sent
    assert sample.token_ids == call.prompt + call.completion
    assert sample.mask == [False] * len(call.prompt) + [True] * len(call.completion)
    assert sample.logprobs == [0.0] * len(call.prompt) + call.logprobs
    assert sample.temperatures == [1.0] * len(call.prompt) + [0.7] * len(call.completion)
    assert (sample.env_name, sample.reward) == ("toy", 0.75)
    assert sample.advantages is sample.rl_weights is sample.ce_weights is sample.ref_logprobs is None


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0] * 3, []])
def test_a_wrong_number_of_logprobs_raises_with_both_counts(talk, user, logprobs):
    talk.turn([user("1+1=")], "2", logprobs=logprobs)
    with pytest.raises(ValueError, match=rf"2 of them sampled, but {len(logprobs)} logprobs"):
        samples(talk)


def test_a_rollout_without_samples_is_empty_not_failed(talk, rollout):
    assert rollout.is_active and rollout.outcome is None
    fresh = type(talk)(talk.renderer, talk.tokenizer)
    silent = Rollout(fresh.trace, env_name="toy", group_id=0, start_version=4, temperature=0.7)
    assert silent.is_active
    silent.attach_samples()
    assert (silent.samples, silent.error, silent.error_kind, silent.failed) == ([], None, None, False)
    assert silent.outcome == Outcome(Stage.EMPTY, "nothing was sampled") and not silent.is_active


@pytest.mark.parametrize("stage", Stage)
def test_a_rollout_leaves_once(rollout, stage):
    rollout.leave(stage, "first", "me")
    assert rollout.outcome == Outcome(stage, "first", "me") and not rollout.is_active
    assert rollout.failed is (stage is Stage.FAILED)
    assert (rollout.error, rollout.error_kind) == (("first", "me") if stage is Stage.FAILED else (None, None))
    with pytest.raises(RuntimeError, match=r"reason='first'.*cannot become .*TRAINED.*reason='second'"):
        rollout.leave(Stage.TRAINED, "second")
    rollout.fail(ValueError("too late to fail"))
    assert rollout.outcome == Outcome(stage, "first", "me") and not rollout.trace.errors


def test_advantages_are_those_of_the_mask_over_all_samples(rollout):
    rollout.samples = rollout.samples * 2
    mask = rollout.samples[0].mask * 2
    rollout.assign_advantages(2)
    assert rollout.advantages == [2.0 * on for on in mask] and 2.0 in rollout.advantages
    rollout.assign_advantages([float(place) for place in range(len(mask))])
    assert rollout.advantages == [float(place) * on for place, on in enumerate(mask)]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_list_of_any_other_length_must_align(rollout, change):
    length = len(rollout.samples[0].token_ids)
    with pytest.raises(ValueError, match=rf"align.*got {length + change} values for {length} token_ids"):
        rollout.assign_advantages([0.0] * (length + change))
    assert rollout.advantages is None


def test_samples_say_where_they_come_from(rollout):
    rollout.index = 2
    rollout.attach_samples()
    assert [sample.origin for sample in rollout.samples] == [Origin(task=3, group=0, rollout=2, agent="agent")]


@pytest.mark.parametrize("logprobs", [[], [-1.0, -2.0], [-9999.0, float("nan")]])
def test_what_a_frozen_model_sampled_trains_without_a_logprob(talk, user, logprobs):
    """Whether its server sends some or none: they are not the policy's."""
    talk.turn([user("1+1=")], "2", logprobs=logprobs)
    rollout = Rollout(talk.trace, env_name="toy", group_id=0, start_version=None, temperature=0.7)
    rollout.attach_samples()
    (sample,), (call,) = rollout.samples, talk.sent
    assert not rollout.live and (rollout.start_version, rollout.end_version) == (None, None)
    assert sample.token_ids == call.prompt + call.completion and trained(sample) == call.completion
    assert sample.logprobs == [0.0] * len(sample.token_ids)
    assert sample.temperatures == [1.0] * len(sample.token_ids), (
        "0.7 is the temperature of its model, not of the policy"
    )
