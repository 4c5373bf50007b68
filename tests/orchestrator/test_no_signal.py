"""What is logged where a run has nothing to train on."""

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
