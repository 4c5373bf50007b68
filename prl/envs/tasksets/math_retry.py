"""Arithmetic with a second try: after a wrong reply the user shows the solution and asks again.

    user 12+34=    model 45    user No: 12+34=46. Once more: 12+34=    model 46

Reward, with `grade` of `prl.envs.tasksets.math`: the grade of the first reply if it is right, else half the grade of
the second.
"""

import verifiers.v1 as vf

from prl.envs.tasksets.integer import grade
from prl.envs.tasksets.math import MathConfig, MathTask, MathTaskset

__all__ = ["MathRetryEnv", "MathRetryTaskset"]


class MathRetryTask(MathTask):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        """Grade the conversation by the formula above, in [0, 1]."""
        first, *later = [self.grade(message.content or "") for message in trace.assistant_messages]
        return 0.5 * later[-1] if later else first

    @vf.metric
    async def correct_at_once(self, trace: vf.Trace) -> float:
        """Return 1.0 if the first reply is right, else 0.0."""
        return float(trace.num_turns == 1 and self.grade(trace.last_reply) == 1.0)


class MathRetryTaskset(MathTaskset, vf.Taskset[MathRetryTask, MathConfig]):
    """The problems of `prl.envs.tasksets.math`."""

    IN_PROCESS = True


def correction(problem: str, answer: int) -> str:
    """Return the user's answer to a wrong reply; `problem` is the prompt."""
    return f"No: {problem}{answer}. Once more: {problem}"


class MathRetryEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            reply = await talk.turn()
            if grade(reply.last_reply, task.data.answer) < 1.0:
                await talk.turn(correction(task.data.prompt, task.data.answer))
