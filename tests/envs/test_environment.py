"""An env of a run: its tasks, its tools and seats, its held-out settings, and how it is played."""

import sys

import pytest
from verifiers.v1.envs.single_agent import SingleAgentEnv

from prl.base.errors import ConfigError
from prl.config.schema import EnvConfig
from prl.engines.renderer import make_renderer
from prl.envs.environment import Environment


def test_held_out_tasks_differ_only_by_eval_args():
    config = EnvConfig(
        taskset="prl.envs.tasksets.math", args={"max_operand": 5, "num_tasks": 9}, eval_args={"split": "eval"}
    )
    env = Environment("math", config, eval_tasks=3)
    assert len(env.tasks) == 9 and len(env.eval_tasks) == 3
    assert not {task.key for task in env.tasks} & {task.key for task in env.eval_tasks}


@pytest.mark.parametrize(("eval_args", "eval_tasks"), [(None, 5), ({"split": "eval"}, 0)])
def test_no_held_out_tasks_without_a_split(eval_args, eval_tasks):
    config = EnvConfig(taskset="prl.envs.tasksets.math", args={"num_tasks": 3}, eval_args=eval_args)
    assert Environment("math", config, eval_tasks=eval_tasks).eval_tasks == []


@pytest.mark.parametrize(("name", "fits"), [("default", False), ("qwen3", True)])
def test_tools_want_a_renderer_that_knows_them(tokenizer, name, fits):
    renderer = make_renderer(tokenizer, name=name)
    Environment(
        "math", EnvConfig(taskset="prl.envs.tasksets.math", args={"num_tasks": 3}), eval_tasks=0
    ).check_renderer(renderer)
    env = Environment("calc", EnvConfig(taskset="prl.envs.tasksets.calculator", args={"num_tasks": 3}), eval_tasks=0)
    if fits:
        return env.check_renderer(renderer)
    with pytest.raises(
        ConfigError, match="env 'calc' has tools, but the renderer does not support tool calls: .*renderer=<family>"
    ):
        env.check_renderer(renderer)


# --- tools, seats, held-out settings ----------------------------------------------------------------------------------

TOOLS = """
class Sums(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    IN_PROCESS = True

    async def setup(self):
        self.ready = True

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        return a + b if self.ready else 0

class Again(Sums):
    pass

class Spawned(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        return a + b

class Three(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "3")

class One(vf.Taskset[Three, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [{made}]

    def load(self):
        yield Three(vf.TaskData(idx=0, prompt="1+2="))

__all__ = ["One"]
"""


async def test_a_taskset_with_nothing_but_tools_is_played_here(module, scripted):
    name = module(TOOLS.format(made="Sums(vf.ToolsetConfig())"))
    env = Environment("mine", EnvConfig(taskset=name, in_process=True), eval_tasks=0)
    assert isinstance(env.verifiers_env, SingleAgentEnv) and not env.uses_harness
    script = ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "3"]
    async with env.serving():
        (rollout,) = await env.play(env.tasks[0], 1, scripted(script), group_id=0)
        assert env.seats == 1
    assert rollout.error is None and rollout.reward == 1.0
    assert [m.role for m in rollout.trace.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.trace.messages[2].content == "3"


STATES = """
class Red(vf.State):
    pass
class Blue(vf.State):
    pass
class RedTools(vf.Toolset[vf.ToolsetConfig, Red]):
    IN_PROCESS = True
class BlueTools(vf.Toolset[vf.ToolsetConfig, Blue]):
    IN_PROCESS = True
"""


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("Sums(vf.ToolsetConfig()), Again(vf.ToolsetConfig())", "two tools are named 'add'"),
        ("RedTools(vf.ToolsetConfig()), BlueTools(vf.ToolsetConfig())", "a rollout has one state"),
    ],
)
def test_tools_that_do_not_go_together_are_refused(module, refused, made, message):
    assert f"envs.mine.taskset='package_of_tests.tasks': {message}" in refused(module(STATES + TOOLS.format(made=made)))


@pytest.mark.parametrize(
    "made", ["Spawned(vf.ToolsetConfig())", "Sums(vf.ToolsetConfig()), Spawned(vf.ToolsetConfig())"]
)
def test_slow_tools_are_served_by_verifiers(module, monkeypatch, made, refused):
    name = module(TOOLS.format(made=made))
    assert "tools that run in processes of their own, which needs verifiers' own Env" in refused(name)
    monkeypatch.setattr("prl.envs.environment.load_harness_env", lambda taskset, args, *_: (taskset, args))
    monkeypatch.setitem(sys.modules, "installed", sys.modules[name])
    env = Environment("mine", EnvConfig(taskset="installed", args={}), eval_tasks=0)
    assert env.verifiers_env == env.eval_verifiers_env == ("installed", {}) and env.uses_harness


CONVERSES = """
class SpokenConfig(vf.TasksetConfig):
    word: str = "train"

class Spoken(vf.Taskset[vf.Task, SpokenConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(idx=0, prompt=f"a {self.config.word} task"))

class TwoConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()
    listener: vf.AgentConfig = vf.AgentConfig()

class Two(vf.Env[TwoConfig]):
    async def setup(self, agents):
        agents.listener.trainable = LISTENER_TRAINS

    async def start(self):
        self.open = True

    async def stop(self):
        self.open = False

    async def run(self, task, agents):
        assert self.open
        for agent in (agents.speaker, agents.listener):
            async with agent.interaction(task) as talk:
                await talk.turn()
                await talk.turn(self.taskset.config.word)

__all__ = ["Spoken", "Two"]
"""


@pytest.mark.parametrize("both", [True, False])
async def test_each_agent_that_is_trained_is_a_seat(module, scripted, both):
    name = module(CONVERSES.replace("LISTENER_TRAINS", str(both)))
    env = Environment("mine", EnvConfig(taskset=name, in_process=True), eval_tasks=0)
    async with env.serving():
        assert env.seats == 1 + both
        rollouts = await env.play(env.tasks[0], 3, scripted(["hi", "ho"]), group_id=0)
    assert [rollout.agent.name for rollout in rollouts] == ["speaker", *["listener"] * both] * 3
    assert not any(rollout.error for rollout in rollouts) and not env.verifiers_env.open


async def test_held_out_tasks_play_with_their_own_settings(module, scripted):
    name = module(CONVERSES.replace("LISTENER_TRAINS", "False"))
    env = Environment("mine", EnvConfig(taskset=name, eval_args={"word": "eval"}, in_process=True), eval_tasks=1)
    async with env.serving():
        for (task,), word, held_out in ((env.tasks, "train", False), (env.eval_tasks, "eval", True)):
            sampler = scripted(["hi", "ho"])
            (rollout,) = await env.play(task, 1, sampler, group_id=0, held_out=held_out)
            assert rollout.error is None
            assert [m.content for m in rollout.trace.messages] == [f"a {word} task", "hi", word, "ho"]
    assert not env.eval_verifiers_env.open
