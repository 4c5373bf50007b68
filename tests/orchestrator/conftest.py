"""A toy task and rollouts made by hand; nothing here starts an engine."""

import itertools

import pytest
import verifiers.v1 as vf
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

from prl.models import model_path
from prl.rollouts.renderer import make_renderer
from prl.rollouts.rollout import Rollout
from prl.wire import TrainingSample


@pytest.fixture(scope="session")
def renderer():
    from transformers import AutoTokenizer

    return make_renderer(AutoTokenizer.from_pretrained(model_path("tiny"), local_files_only=True), "qwen3", {})


@pytest.fixture
def make_sample():
    def make(length=4, prompt=1, *, env="toy", start=0, **streams) -> TrainingSample:
        """`length` tokens counting up from `start`, the first `prompt` of them off the mask."""
        return TrainingSample(
            token_ids=list(range(start, start + length)),
            mask=[i >= prompt for i in range(length)],
            logprobs=[-0.5 * (i >= prompt) for i in range(length)],
            temperatures=[1.0] * length,
            env_name=env,
            reward=0.0,
            **streams,
        )

    return make


@pytest.fixture
def make_rollout(make_sample):
    numbers = itertools.count()

    def make(reward=0.0, *, env="toy", lengths=(4,), version=0, advantages=None, error=None, group=0) -> Rollout:
        data = vf.TaskData(idx=next(numbers), prompt="1+1=")
        trace = Trace(
            task=TraceTask.model_construct(type="Toy", data=data, key="k", hash="h"),
            agent=AgentInfo.model_construct(
                config=WireAgentConfig.model_construct(), runtime=None, name="agent", trainable=True
            ),
        )
        trace.record_reward("answer", reward)
        rollout = Rollout(trace, env_name=env, group_id=group, start_version=version, temperature=1.0)
        rollout.samples = [make_sample(length, env=env) for length in lengths]
        if advantages is not None:
            rollout.assign_advantages(advantages)
        rollout.error = error
        return rollout

    return make
