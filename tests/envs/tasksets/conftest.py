"""Conversations that are graded as they stand."""

import asyncio

import pytest
import verifiers.v1 as vf


@pytest.fixture
def graded():
    """`graded(task, *replies)`: the trace of a conversation with these replies of the model, graded."""

    def grade(task, *replies):
        messages = [
            reply if isinstance(reply, vf.AssistantMessage) else vf.AssistantMessage(content=reply) for reply in replies
        ]
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=[vf.MessageNode(message=message, sampled=True) for message in messages],
        )
        asyncio.run(task.score(trace))
        return trace

    return grade
