"""What is logged where a run has nothing to train on."""

import pytest

from prl.orchestrator.no_signal import what_to_look_at


@pytest.fixture
def replying(make_rollout):
    def make(reward, reply, **how):
        rollout = make_rollout(reward, **how)
        rollout.__class__ = type("Replied", (type(rollout),), {"last_reply": reply, "is_truncated": len(reply) > 300})
        return rollout

    return make


def test_rewards_and_a_reply_in_one_harmless_line(replying):
    reply = "I\x1b[31m think\n\nthat \u202e2+2=4\r"
    late = replying(0.0, "late", error="TimeoutError: late")
    message = what_to_look_at([late, replying(0.0, reply), replying(0, "4")])
    assert message.startswith("Every reward is 0; a length limit cut off 0 of 2 replies.")
    assert message.endswith(r"with reward 0: I\x1b[31m think that \u202e2+2=4") and "\n" not in message


def test_long_and_empty_replies_are_cut_and_named(replying):
    message = what_to_look_at([replying(0.25, "word " * 200), replying(1.0, "")])
    assert message.startswith("Rewards are from 0.25 to 1; a length limit cut off 1 of 2 replies.")
    assert message.endswith(" …") and len(message.split("reward 0.25: ")[1]) < 410
    assert what_to_look_at([replying(1.0, "  ")]).endswith("with reward 1: an empty one")
    assert what_to_look_at([replying(0.0, "x", error="no")]) == "Every rollout failed"
