"""Rollouts with made-up tokens: what was sampled, and how likely it was."""

import pytest
from orchestrating import *  # noqa: F403  # a toy run and its parts
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import AssistantMessage, UserMessage

VOCABULARY = 150_000


@pytest.fixture
def says():
    def make(*tokens, p=None, ids=None) -> MessageNode:
        """A sampled message behind a token of the template: logprobs as they are, or ids of tokens of logprob `p`."""
        logprobs = list(tokens) if ids is None else [p] * len(ids)
        ids = list(range(1, len(logprobs) + 1)) if ids is None else list(ids)
        return MessageNode(
            message=AssistantMessage(content=""),
            sampled=True,
            token_ids=[0, *ids],
            mask=[False] + [True] * len(ids),
            logprobs=[value for value in logprobs if value is not None],
        )

    return make


@pytest.fixture
def asks():
    """A message of the env, of three tokens."""
    return lambda: MessageNode(message=UserMessage(content=""), token_ids=[7, 7, 7], mask=[False] * 3)


@pytest.fixture
def rollout_of(make_rollout):
    def make(*branches, live=True):
        """A rollout with these branches, each a list of messages; they may share a beginning."""
        rollout = make_rollout(version=0 if live else None)
        nodes = rollout.trace.nodes
        for branch in branches:
            for parent, node in zip([None, *branch], branch, strict=False):
                if not any(node is other for other in nodes):
                    node.parent = next((i for i, other in enumerate(nodes) if other is parent), None)
                    nodes.append(node)
        assert len(rollout.trace.branches) == len(branches)
        rollout.attach_samples()
        return rollout

    return make
