"""What is logged where a run has nothing to train on."""

import json

import pytest

from prl.orchestrator.no_signal import what_to_look_at


@pytest.fixture
def replying(make_rollout):
    def make(reward, reply, **how):
        rollout = make_rollout(reward, **how)
        rollout.__class__ = type("Replied", (type(rollout),), {"is_truncated": len(reply) > 300})
        said = property(lambda trace: reply)
        rollout.trace.__class__ = type("Replies", (type(rollout.trace),), {"last_reply": said})
        return rollout

    return make


def test_rewards_and_a_reply_in_one_harmless_line(replying):
    reply = "I\x1b[31m think\n\nthat \u202e2+2=4\r"
    late = replying(0.0, "late", error="TimeoutError: late")
    message = what_to_look_at([late, replying(0.0, reply), replying(0, "4")])
    assert message.startswith("Every reward is 0; a length limit cut off 0 of 2 replies.")
    assert message.endswith(r"with reward 0: I\x1b[31m think that \u202e2+2=4") and "\n" not in message


@pytest.mark.parametrize(
    ("before", "reward", "advice"),
    [
        ([], 0.0, "curriculum=odf, a larger orchestrator.group_size or sampling.temperature"),
        ([0.0, 0.0], 0.0, "look at the replies in rollouts/ and at the grader"),
        ([0.3, 0.8, 0.7, 0.01], 0.0, "Rewards were earned until step 3, 0.7 in the mean"),
        ([0.3, 0.9], 1.0, "All that can be earned is earned: harder tasks"),
        ([-1.2, -1.0, -2.9], -3.0, "Rewards were earned until step 2, -1 in the mean"),
        ([0.0, 0.03, 0.03, 0.0], 0.0, "too hard for this model"),
        ([0.0, 0.9, 0.0, 0.0], 0.0, "too hard for this model"),
        ([0.05, 0.1], 0.1, "too hard for this model"),
    ],
)
def test_the_advice_knows_what_was_earned_before(replying, tmp_path, before, reward, advice):
    lines = [{"step": 0, "eval/toy/avg@1": 0.5}]
    lines += [{"step": step, "reward/all/mean": mean} for step, mean in enumerate(before, 1)]
    text = "".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 9, "reward/all/mean": None}])
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 10, "rew')
    assert advice in what_to_look_at([replying(reward, "1")], tmp_path)
