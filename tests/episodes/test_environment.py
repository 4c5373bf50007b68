"""Loading tasksets: found, configured, and refused with the key that is wrong."""

import sys

import pytest
from verifiers.v1.envs.single_agent import SingleAgentEnv

from prl.config.schema import EnvConfig
from prl.episodes.environment import Environment, find_taskset, load_taskset
from prl.episodes.multi_turn import Direct
from prl.episodes.verifiers_env import model_context
from prl.errors import ConfigError
from prl.inference.renderer import make_renderer

HEAD = "import verifiers.v1 as vf\n"
ONE = "class One(vf.Taskset[vf.Task, vf.TasksetConfig]):\n    def load(self):\n        {body}\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module(source)` makes `package_of_tests.tasks` out of `source`, and gives its name."""
    folder = tmp_path / "package_of_tests"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def make(source):
        (folder / "tasks.py").write_text(HEAD + source)
        return "package_of_tests.tasks"

    yield make
    for name in ("package_of_tests.tasks", "package_of_tests"):
        sys.modules.pop(name, None)


def refused(taskset, args=None):
    with pytest.raises(ConfigError) as caught:
        Environment("mine", EnvConfig(taskset=taskset, args=args or {}), eval_tasks=0)
    return str(caught.value)


def test_training_tasks_and_held_out_tasks_differ_only_in_what_eval_args_say():
    config = EnvConfig(taskset="prl.envs.math", args={"max_operand": 5, "num_tasks": 9}, eval_args={"split": "eval"})
    env = Environment("math", config, eval_tasks=3)
    assert len(env.tasks) == 9 and len(env.eval_tasks) == 3
    assert not {task.key for task in env.tasks} & {task.key for task in env.eval_tasks}


@pytest.mark.parametrize(("eval_args", "eval_tasks"), [(None, 5), ({"split": "eval"}, 0)])
def test_without_a_split_or_a_wish_there_are_no_held_out_tasks(eval_args, eval_tasks):
    config = EnvConfig(taskset="prl.envs.math", args={"num_tasks": 3}, eval_args=eval_args)
    assert Environment("math", config, eval_tasks=eval_tasks).eval_tasks == []


def test_a_taskset_of_the_users_is_found_by_its_dotted_path(module):
    name = module(ONE.format(body="yield vf.Task(vf.TaskData(prompt='hi'))") + "__all__ = ['One']\n")
    (task,) = Environment("mine", EnvConfig(taskset=name), eval_tasks=0).tasks
    assert task.data.prompt == "hi" and task.data.idx == 0


@pytest.mark.parametrize(
    ("taskset", "says"),
    [
        ("no.such.module", "envs.mine.taskset='no.such.module': No module named 'no'; is the package installed?"),
        ("no_such_taskset_at_all", "envs.mine.taskset='no_such_taskset_at_all'"),
        ("prl.errors", "must export exactly one Taskset in __all__, has 0"),
    ],
)
def test_a_taskset_that_is_not_there_is_refused(taskset, says):
    assert says in refused(taskset)


@pytest.mark.parametrize("source", ["1 / 0\n", "class :\n"])
def test_a_module_that_cannot_be_imported_is_refused_with_its_error(module, tmp_path, monkeypatch, source):
    (tmp_path / "an_id_of_tests.py").write_text(source)
    for name in (module(source), "an_id_of_tests"):
        message = refused(name)
        assert f"envs.mine.taskset={name!r}: importing it failed: " in message
        assert "ZeroDivisionError: division by zero" in message and ".py, line" in message or "SyntaxError" in message


@pytest.mark.parametrize(("name", "fits"), [("default", False), ("qwen3", True)])
def test_tools_want_a_renderer_that_knows_them(tokenizer, name, fits):
    renderer = make_renderer(tokenizer, name, {})
    Environment("math", EnvConfig(taskset="prl.envs.math", args={"num_tasks": 3}), eval_tasks=0).check_renderer(
        renderer
    )
    env = Environment("calc", EnvConfig(taskset="prl.envs.calculator", args={"num_tasks": 3}), eval_tasks=0)
    if fits:
        return env.check_renderer(renderer)
    with pytest.raises(
        ConfigError, match="env 'calc' has tools, but the renderer knows no tool calls: .*renderer=<family>"
    ):
        env.check_renderer(renderer)


def test_two_tasksets_in_a_module_are_ambiguous(module):
    body = ONE.format(body="yield vf.Task(vf.TaskData(prompt='hi'))")
    name = module(body + body.replace("One", "Two") + "__all__ = ['One', 'Two']\n")
    assert "exactly one Taskset in __all__, has 2" in refused(name)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_operandd": 3}, "envs.mine.args.max_operandd:"),
        ({"max_operand": "many"}, "envs.mine.args.max_operand:"),
        ({"max_operand": 0}, "envs.mine.args.max_operand:"),
        ({"operations": ["+", "^"]}, "envs.mine.args.operations.1:"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_by_its_full_key_with_those_that_there_are(args, says):
    message = refused("prl.envs.math", args)
    assert message.startswith(says)
    assert "settings of prl.envs.math: split, num_tasks, seed, max_operand, operations" in message


def test_what_a_taskset_refuses_by_itself_is_refused_under_its_key():
    assert refused("prl.envs.reverse_text", {"min_length": 9, "max_length": 3}).startswith("envs.mine.args:")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return iter(())", "has no task with these settings"),
        ("raise ValueError('no data for these settings')", "envs.mine.args: no data for these settings"),
        ("raise OSError('the data file is gone')", "envs.mine.args: the data file is gone"),
        ("yield vf.Task(vf.TaskData(prompt=None))", "no prompt"),
        ("raise KeyError('question')", "envs.mine.args: loading the tasks failed: KeyError: 'question' ("),
    ],
)
def test_a_taskset_without_a_task_to_play_is_refused(module, body, says):
    assert says in refused(module(ONE.format(body=body) + "__all__ = ['One']\n"))


def test_a_taskset_without_an_end_is_capped(module, monkeypatch):
    monkeypatch.setattr("prl.episodes.environment.MAX_TASKS", 25)
    body = "i = 0\n        while True:\n            yield vf.Task(vf.TaskData(prompt=str(i)))\n            i += 1"
    name = module(ONE.format(body=body) + "__all__ = ['One']\n")
    assert len(Environment("mine", EnvConfig(taskset=name), eval_tasks=0).tasks) == 25


def test_the_eval_settings_are_refused_under_their_own_key():
    config = EnvConfig(taskset="prl.envs.math", args={"num_tasks": 3}, eval_args={"splitt": "eval"})
    with pytest.raises(ConfigError, match=r"^envs\.math\.eval_args\.splitt:"):
        Environment("math", config, eval_tasks=1)


def test_a_taskset_gets_its_own_config_class():
    taskset = load_taskset("prl.envs.math", {"num_tasks": 7}, "envs.math.args")
    assert taskset.config.num_tasks == 7 and taskset.config.id == "prl.envs.math"


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
    env = Environment("mine", EnvConfig(taskset=module(TOOLS.format(made="Sums(vf.ToolsetConfig())"))), eval_tasks=0)
    assert isinstance(env.program, SingleAgentEnv) and env.context is Direct
    script = ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "3"]
    async with env.serving():
        (rollout,) = await env.play(env.tasks[0], 1, scripted(script), group_id=0)
        assert env.seats == 1
    assert rollout.error is None and rollout.reward == 1.0
    assert [m.role for m in rollout.trace.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.trace.messages[2].content == "3"


def test_two_tools_of_one_name_are_refused_with_the_env_that_has_them(module):
    both = "Sums(vf.ToolsetConfig()), Again(vf.ToolsetConfig())"
    message = refused(module(TOOLS.format(made=both)))
    assert message.startswith("envs.mine.taskset='package_of_tests.tasks': two tools are named 'add'")


def test_states_that_do_not_fit_are_refused_with_the_env_that_has_them(module):
    states = """
class Red(vf.State):
    pass
class Blue(vf.State):
    pass
class RedTools(vf.Toolset[vf.ToolsetConfig, Red]):
    IN_PROCESS = True
class BlueTools(vf.Toolset[vf.ToolsetConfig, Blue]):
    IN_PROCESS = True
"""
    message = refused(module(states + TOOLS.format(made="RedTools(vf.ToolsetConfig()), BlueTools(vf.ToolsetConfig())")))
    assert message.startswith("envs.mine.taskset='package_of_tests.tasks': a rollout has one state")


@pytest.mark.parametrize(
    "made", ["Spawned(vf.ToolsetConfig())", "Sums(vf.ToolsetConfig()), Spawned(vf.ToolsetConfig())"]
)
def test_tools_that_do_not_promise_to_be_quick_go_to_verifiers_own_program(module, monkeypatch, made):
    name = module(TOOLS.format(made=made))
    assert "tools that run in processes of their own, which takes verifiers' own Env" in refused(name)
    monkeypatch.setattr("prl.episodes.environment.make_program", lambda taskset, args: (taskset, args))
    monkeypatch.setattr(
        "prl.episodes.environment.find_taskset", lambda taskset, where, found=find_taskset: found(name, where)
    )
    env = Environment("mine", EnvConfig(taskset="installed", args={}), eval_tasks=0)
    assert env.program == ("installed", {}) and env.context is model_context


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
    env = Environment("mine", EnvConfig(taskset=name), eval_tasks=0)
    async with env.serving():
        assert env.seats == 1 + both
        rollouts = await env.play(env.tasks[0], 3, scripted(["hi", "ho"]), group_id=0)
    assert [rollout.agent.name for rollout in rollouts] == ["speaker", *["listener"] * both] * 3
    assert not any(rollout.error for rollout in rollouts) and not env.program.open


async def test_held_out_tasks_are_played_with_the_settings_they_were_made_with(module, scripted):
    name = module(CONVERSES.replace("LISTENER_TRAINS", "False"))
    env = Environment("mine", EnvConfig(taskset=name, eval_args={"word": "eval"}), eval_tasks=1)
    async with env.serving():
        for (task,), word in ((env.tasks, "train"), (env.eval_tasks, "eval")):
            (rollout,) = await env.play(task, 1, scripted(["hi", "ho"]), group_id=0)
            assert rollout.error is None
            assert [m.content for m in rollout.trace.messages] == [f"a {word} task", "hi", word, "ho"]
    assert not env.eval_program.open
