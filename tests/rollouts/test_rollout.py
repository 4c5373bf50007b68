"""Samples of real traces: what is trained, once, and with whose logprobs."""

import pytest

from prl.rollouts.rollout import IN_BATCH, Outcome, Rollout, Stage
from prl.rollouts.samples import samples_of
from prl.wire.messages import CallVersions, Origin


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


def test_one_turn_is_the_prompt_and_the_completion_as_the_model_saw_them(talk, user):
    talk.turn([user("1+1=")], "2")
    talk.trace.record_reward("answer", 0.75)
    (sample,), (call,) = samples(talk), talk.sent
    assert sample.token_ids == call.prompt + call.completion
    assert sample.mask == [False] * len(call.prompt) + [True] * len(call.completion)
    assert sample.logprobs == [0.0] * len(call.prompt) + call.logprobs
    assert sample.temperatures == [1.0] * len(call.prompt) + [0.7] * len(call.completion)
    assert (sample.env_name, sample.reward) == ("toy", 0.75)
    assert sample.advantages is sample.rl_weights is sample.ce_weights is sample.ref_logprobs is None


def test_turns_that_extend_each_other_are_one_sample(talk, user, tokenizer):
    first = [user("1+1=")]
    rest = talk.turn(first, "2")
    call = talk.sent[0]
    # Whether a second prompt extends the first is the renderer's doing; this one does by construction.
    whole = call.prompt + call.completion + tokenizer.encode("\n", add_special_tokens=False)
    rendered = talk.renderer.render([{"role": "user", "content": "2+2="}], add_generation_prompt=True).token_ids
    extend(talk, [*rest, user("2+2=")], whole + rendered, [9, 10], [-5.0, -6.0])
    (sample,) = samples(talk)
    assert sample.token_ids == whole + rendered + [9, 10]
    assert trained(sample) == call.completion + [9, 10]
    assert trained_logprobs(sample) == call.logprobs + [-5.0, -6.0]
    assert all(x == 0.0 for x, m in zip(sample.logprobs, sample.mask, strict=True) if not m)


def extend(talk, messages, prompt_ids, completion_ids, logprobs):
    from verifiers.v1 import graph
    from verifiers.v1.types import AssistantMessage, Response, TurnTokens, Usage

    before = sum(len(call.prompt) + len(call.completion) for call in talk.sent)
    spans = [None] * (len(messages) - 1) + [(before, len(prompt_ids))]
    graph.prepare_turn(talk.trace, messages).commit(
        Response.model_construct(
            id="",
            created=0,
            model="policy",
            message=AssistantMessage(content="x"),
            finish_reason="stop",
            usage=Usage(prompt_tokens=1, completion_tokens=1),
            tokens=TurnTokens.model_construct(
                prompt_ids=prompt_ids,
                completion_ids=completion_ids,
                completion_logprobs=logprobs,
                message_spans=spans,
                is_content=None,
            ),
        )
    )


def test_an_edited_history_starts_a_new_sample(talk, user):
    talk.turn([user("1+1=")], "2")
    talk.turn([user("3+3=")], "6")
    one, two = samples(talk)
    assert [one.token_ids, two.token_ids] == [call.prompt + call.completion for call in talk.sent]
    assert [trained(one), trained(two)] == [call.completion for call in talk.sent]


def test_tokens_on_several_branches_train_on_the_first_of_them_only(talk, user):
    history = talk.turn([user("1+1=")], "2")
    call = talk.sent[0]
    whole = call.prompt + call.completion
    for text, ids in (("a", [9]), ("b", [10])):
        tail = talk.renderer.render([{"role": "user", "content": text}], add_generation_prompt=True).token_ids
        extend(talk, [*history, user(text)], whole + tail, ids, [-7.0])
    one, two = samples(talk)
    assert one.token_ids[: len(whole)] == two.token_ids[: len(whole)] == whole
    assert trained(one) == call.completion + [9] and trained(two) == [10]
    assert trained_logprobs(two) == [-7.0]
    assert sum(map(sum, (one.mask, two.mask))) == len(call.completion) + 2


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0] * 3, []])
def test_a_wrong_number_of_logprobs_raises_with_both_counts(talk, user, logprobs):
    talk.turn([user("1+1=")], "2", logprobs=logprobs)
    with pytest.raises(ValueError, match=rf"2 of them sampled, but {len(logprobs)} logprobs"):
        samples(talk)


def test_a_trace_without_a_turn_gives_no_sample(talk):
    assert samples(talk) == []


def test_what_was_never_asked_leaves_as_empty_and_not_as_failed(talk, rollout):
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


def test_stages_stand_in_the_order_of_the_road():
    assert [stage.value for stage in Stage] == [
        "failed",
        "empty",
        "difficulty",
        "pre_filtered",
        "stale",
        "surplus",
        "post_filtered",
        "unlearnable",
        "trained",
    ]
    assert IN_BATCH == (Stage.POST_FILTERED, Stage.UNLEARNABLE, Stage.TRAINED)


def test_the_first_failure_counts(rollout):
    rollout.fail(TimeoutError("late"))
    rollout.fail(ValueError("later"), "reference")
    assert (rollout.error, rollout.error_kind) == ("TimeoutError: late", "timeout")
    assert [error.message for error in rollout.trace.errors] == ["late"]


def test_an_error_is_text_that_a_file_takes(rollout):
    rollout.fail(KeyError("half a pair: \ud83d, a whole one: \U0001f600"))
    assert rollout.error == "KeyError: 'half a pair: \\ud83d, a whole one: \U0001f600'", "repr spells it out"
    other = Rollout(rollout.trace, env_name="toy", group_id=0, start_version=4, temperature=0.7)
    other.fail(ValueError("half a pair: \ud83d, a whole one: \U0001f600"))
    assert other.error == "ValueError: half a pair: ?, a whole one: \U0001f600"


def test_a_scalar_is_broadcast_over_what_trains(rollout):
    rollout.assign_advantages(2)
    (sample,) = rollout.samples
    assert rollout.advantages == [2.0 if m else 0.0 for m in sample.mask] and 2.0 in rollout.advantages


def test_a_list_is_kept_on_the_mask_and_zero_off_it(rollout):
    (sample,) = rollout.samples
    rollout.assign_advantages([0.5] * len(sample.mask))
    assert rollout.advantages == [0.5 if m else 0.0 for m in sample.mask]


def test_a_list_spans_all_samples_one_after_the_other(rollout):
    rollout.samples = rollout.samples * 2
    length = len(rollout.samples[0].mask)
    rollout.assign_advantages([float(i) for i in range(2 * length)])
    assert rollout.advantages[-1] == 2 * length - 1


@pytest.mark.parametrize("change", [-1, 1])
def test_a_list_of_any_other_length_must_align(rollout, change):
    length = len(rollout.samples[0].token_ids)
    with pytest.raises(ValueError, match=rf"align.*got {length + change} values for {length} token_ids"):
        rollout.assign_advantages([0.0] * (length + change))
    assert rollout.advantages is None


def test_a_rollout_answers_for_its_trace(rollout, talk):
    talk.trace.record_reward("answer", 1.0)
    assert (rollout.reward, rollout.num_turns) == (1.0, 1) and rollout.nodes is talk.trace.nodes
    assert (rollout.start_version, rollout.end_version) == (4, 4)
    assert rollout.num_completion_tokens == len(talk.sent[0].completion)
    with pytest.raises(AttributeError, match="nonsense"):
        rollout.nonsense  # noqa: B018


def test_the_parts_of_a_trace_are_declared(rollout, talk):
    trace = talk.trace
    trace.record_metric("correct", 1.0)
    trace.info["hint"] = "x"
    assert (rollout.task, rollout.agent, rollout.metrics) == (trace.task, trace.agent, {"correct": 1.0})
    assert rollout.info is trace.info
    assert [branch.index for branch in rollout.branches] == [branch.index for branch in trace.branches]
    assert rollout.is_truncated is trace.is_truncated is False


def test_samples_say_where_they_come_from(rollout):
    rollout.index = 2
    rollout.attach_samples()
    assert [sample.origin for sample in rollout.samples] == [
        Origin(task=3, group=0, rollout=2, agent="agent", versions=[CallVersions(12, 15, 4, 4)])
    ]


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


def test_what_the_policy_sampled_at_version_zero_is_its_own(talk, user):
    talk.turn([user("1+1=")], "2")
    rollout = Rollout(talk.trace, env_name="toy", group_id=0, start_version=0, temperature=0.7)
    rollout.attach_samples()
    assert rollout.live and trained_logprobs(rollout.samples[0]) == talk.sent[0].logprobs
