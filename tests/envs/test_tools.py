"""Tools in this process: their names, what they answer, whose state they see."""

import asyncio
import json

import pytest
import verifiers.v1 as vf
from verifiers.v1.types import ToolCall

from prl.envs.tools import Tools


class Count(vf.State):
    calls: int = 0


class MoreThanCount(Count):
    seen: str = ""


class Desk(vf.Toolset[vf.ToolsetConfig, Count]):
    IN_PROCESS = True

    def __init__(self, config=None):
        super().__init__(config or vf.ToolsetConfig())
        self.order = []

    async def setup(self):
        self.order.append("setup")

    async def setup_task(self, task):
        self.order.append(("setup_task", task.prompt))

    @vf.tool
    async def add(self, a: int, b: int = 1) -> int:
        """The sum."""
        return a + b

    @vf.tool
    async def count(self) -> str:
        """How often it was called in this rollout."""
        before = self.state.calls
        await asyncio.sleep(0)  # the others have their turn
        self.state.calls = before + 1
        return str(self.state.calls)

    @vf.tool
    def pair(self, text: str) -> dict:
        return {"text": text, "é": None}

    @vf.tool
    async def say(self, text: str) -> str:
        return text

    @vf.tool
    async def nothing(self) -> None:
        pass

    @vf.tool
    async def fail(self, why: str = "") -> str:
        raise {"key": KeyError, "late": TimeoutError}.get(why, RuntimeError)(why)


class Bare(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    IN_PROCESS = True

    @vf.tool
    async def add(self, a: int) -> int:
        return a


class Named(Bare):
    TOOL_PREFIX = "my"


def call(name, arguments="{}"):
    return ToolCall(id="c7", name=name, arguments=arguments if isinstance(arguments, str) else json.dumps(arguments))


async def ask(tools, name, arguments="{}", state=None):
    return (await tools.answer(call(name, arguments), Count() if state is None else state)).content


def test_tools_have_the_names_of_verifiers_servers():
    names = [tool.name for tool in Tools([Desk(), Bare(vf.ToolsetConfig()), Named(vf.ToolsetConfig())]).declared]
    assert names == ["desk_add", "desk_count", "desk_fail", "desk_nothing", "desk_pair", "desk_say", "add", "my_add"]


def test_the_model_is_told_of_them_in_openais_format():
    add = Tools([Desk()]).wire[0]
    assert add["type"] == "function" and add["function"]["name"] == "desk_add"
    assert add["function"]["description"] == "The sum."
    schema = add["function"]["parameters"]
    assert schema["type"] == "object" and schema["required"] == ["a"]
    assert {name: field["type"] for name, field in schema["properties"].items()} == {"a": "integer", "b": "integer"}
    assert Tools().wire is None


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("desk_add", {"a": 40, "b": 2}, "42"),
        ("desk_add", '{"a": 1}', "2"),
        ("desk_pair", {"text": 'é "x"'}, '{"text":"é \\"x\\"","é":null}'),
        ("desk_say", '{"text": "\\ud800!"}', "?!"),
        ("desk_add", "[" * 100_000, "error: the arguments are not JSON: maximum recursion depth exceeded"),
        ("desk_nothing", {}, "null"),
        ("desk_nothing", "", "null"),
        ("desk_add", {"a": "many"}, "error: a: Input should be a valid integer, unable to parse string as an integer"),
        ("desk_add", "[1]", "error: the arguments must be a JSON object"),
        ("desk_add", "a=1", "error: the arguments are not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("desk_fail", {"why": "no reason"}, "error: no reason"),
        ("desk_fail", {}, "error: RuntimeError"),
        ("desk_fail", {"why": "late"}, "error: late"),
        ("desk_fail", {"why": "key"}, "error: 'key'"),
        ("add", {"a": 1}, "error: there is no tool 'add'"),
    ],
)
async def test_results_and_faults_of_calls_are_answers(name, arguments, answer):
    assert (await ask(Tools([Desk()]), name, arguments)).startswith(answer)


async def test_each_rollout_has_a_tool_state_of_its_own():
    tools, one, two = Tools([Desk()]), Count(), Count(calls=10)

    async def three(state):
        return [await ask(tools, "desk_count", state=state) for _ in range(3)]

    assert await asyncio.gather(three(one), three(two)) == [["1", "2", "3"], ["11", "12", "13"]]
    assert (one.calls, two.calls) == (3, 13)
    assert await ask(tools, "desk_count", state=one) == "4" and tools.toolsets[0].state.calls == 0, (
        "nobody's, between calls"
    )


class Counted(vf.Task[vf.TaskData, Count]):
    pass


class CountedMore(vf.Task[vf.TaskData, MoreThanCount]):
    pass


@pytest.mark.parametrize(
    ("task", "toolsets", "cls"),
    [
        (vf.Task, [], vf.State),
        (vf.Task, [Desk()], Count),
        (Counted, [Desk()], Count),
        (CountedMore, [Desk()], MoreThanCount),
        (Counted, [Bare(vf.ToolsetConfig())], Count),
    ],
)
def test_state_class_comes_from_task_or_tools(task, toolsets, cls):
    tools, task = Tools(toolsets), task(vf.TaskData(prompt="hi"))
    one, two = tools.new_state(task), tools.new_state(task)
    assert type(one) is cls and one is not two


def test_two_tools_of_one_name_need_a_prefix():
    with pytest.raises(ValueError, match="two tools are named 'add'; give their toolsets a TOOL_PREFIX each"):
        Tools([Bare(vf.ToolsetConfig()), Bare(vf.ToolsetConfig())])
    with pytest.raises(ValueError, match="two tools are named 'desk_add'"):
        Tools([Desk()]).joined([Desk()])
    assert len(Tools([Bare(vf.ToolsetConfig()), Named(vf.ToolsetConfig())]).declared) == 2
