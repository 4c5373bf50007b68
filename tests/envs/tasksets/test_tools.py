"""tools: a class as an env: what its methods answer, whose state they see, what fails an episode, what is refused."""

import asyncio
import json
import sqlite3
import threading
import time
from typing import Annotated

import pytest
from pydantic import Field
from run_processes import wait_until

from prl.config.schema import EnvConfig, WorkersConfig
from prl.envs.environment import Environment
from prl.envs.tasksets.tools import ToolsConfig, ToolsTaskset

ROWS = [{"prompt": "Spend it.", "budget": 5, "bought": []}]


class Base:
    currency = "coins"

    def left_over(self) -> int:
        """Count what is left."""
        return self.left


class Shop(Base):
    """Things of another name, an instance each episode, in a thread of its own."""

    def reset(self, row):
        self.left, self.bought = row["budget"], row["bought"]
        self.thread = threading.get_ident()
        self.orders = sqlite3.connect(":memory:")  # which other threads may not use

    def buy(self, price: int, item: Annotated[str, Field(description="The thing.")] = "tea") -> str:
        """Buy something.

        Args:
            price: What it costs.
        """
        assert threading.get_ident() == self.thread and self.orders.execute("select 1").fetchone() == (1,)
        if price > self.left:
            raise ValueError("too dear")
        self.left -= price
        self.bought.append(item)
        return f"{self.left} {self.currency}"

    async def look(self, shelf: str) -> dict:
        """Look at a shelf."""
        await asyncio.sleep(0)
        return {"shelf": shelf, "bought": self.bought}

    @staticmethod
    def hours(day: str | None = None) -> list[int]:
        """Tell the opening hours."""
        return [9, 17]

    @classmethod
    async def name(cls) -> str:
        """Tell the shop's name."""
        return cls.__name__

    def first(self) -> str:
        """Take the first of nothing."""
        return next(iter(()))

    def leave(self) -> None:
        """Leave in an odd way."""
        raise SystemExit(3)

    def _hidden(self):
        raise AssertionError

    @property
    def full(self):
        raise AssertionError

    def reward(self):
        return float(self.left == 0)


class Graded(Shop):
    """Graded by its last reply, and all asynchronous."""

    async def reset(self, row):
        super().reset(row)
        return row.get("said")

    async def reward(self, reply):
        return float(reply == "done")


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def env_of(tmp_path):
    """`env_of(class or name, rows=…, **options)`: an Environment over it."""

    def make(cls, rows=ROWS, config=None, **args):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        env = cls if isinstance(cls, str | dict) else f"{__name__}.{cls.__name__}"
        args = {"env": env, "path": str(path), "eval_fraction": 0} | args
        return Environment(
            "shop", EnvConfig(taskset="prl.envs.tasksets.tools", args=args, **config or {}), eval_tasks=0
        )

    return make


@pytest.fixture
def play(env_of, scripted):
    """`play(script, class, n=1, **options)`: the rollouts of a group."""

    async def group(script, cls=Shop, n=1, **how):
        environment = env_of(cls, **how)
        async with environment.serving():
            return await environment.play(environment.tasks[0], n, scripted(script), group_id=0)

    return group


def answers(rollout):
    return [message.content for message in rollout.trace.messages if message.role == "tool"]


# --- tools ------------------------------------------------------------------------------------------------------------


def test_the_model_is_told_of_public_methods_in_their_order(env_of):
    tools = env_of(Shop).tools.wire
    described = {tool["function"]["name"]: tool["function"] for tool in tools}
    assert list(described) == ["left_over", "buy", "look", "hours", "name", "first", "leave"]
    assert described["left_over"]["description"] == "Count what is left."
    buy, properties = described["buy"], described["buy"]["parameters"]["properties"]
    assert buy["description"].startswith("Buy something.\n\nArgs:\n    price: What it costs.")
    assert buy["parameters"]["required"] == ["price"] and properties["price"]["type"] == "integer"
    assert (properties["item"]["type"], properties["item"]["description"]) == ("string", "The thing.")
    assert properties["item"]["default"] == "tea"
    assert described["name"]["parameters"]["properties"] == {}


@pytest.mark.parametrize(
    ("called", "answer"),
    [
        (call("buy", price=2), "3 coins"),
        (call("buy", price="2", item="a"), "3 coins"),
        (call("look", shelf="é"), '{"shelf":"é","bought":[]}'),
        (call("left_over"), "5"),
        (call("hours"), "[9,17]"),
        (call("name"), "Shop"),
        (call("buy", price=6), "error: too dear"),
        (call("buy"), "error: price: Field required"),
        (call("buy", price=1, amount=2), "error: there is no argument 'amount'"),
        (call("buy", price="many"), "error: price: Input should be a valid integer"),
        (call("first"), "error: "),
        (call("leave"), "error: the env's code let SystemExit escape: 3"),
        (call("reward"), "error: there is no tool 'reward'"),
        (call("_hidden"), "error: there is no tool '_hidden'"),
        ("<tool_call>\n{buy\n</tool_call>", "error: the tool call cannot be read"),
    ],
)
async def test_a_call_is_answered(play, called, answer):
    (rollout,) = await play([called, "done"])
    (given,) = answers(rollout)
    assert given.startswith(answer) and rollout.error is None and rollout.reward == 0.0


# --- an episode -------------------------------------------------------------------------------------------------------


async def test_each_episode_has_its_state(play):
    """The same replies to each of a group: none sees what another has bought, in attributes or in the row."""
    rollouts = await play([call("buy", price=3), call("look", shelf="a"), call("buy", price=2), "done"], n=5)
    for rollout in rollouts:
        assert answers(rollout) == ["2 coins", '{"shelf":"a","bought":["tea"]}', "0 coins"]
        assert rollout.reward == 1.0 and rollout.metrics["tool_calls"] == 3
    wait_until(lambda: "prl-tools" not in {t.name for t in threading.enumerate()}, 10, "their threads end")


@pytest.mark.parametrize(
    ("prompt", "said", "messages"),
    [
        ("Buy.", None, [("user", "Buy.")]),
        ("Buy.", "Tea is 2.", [("user", "Buy.\n\nTea is 2.")]),
        (None, "Tea is 2.", [("user", "Tea is 2.")]),
        ([{"role": "assistant", "content": "Hi."}], "Tea.", [("assistant", "Hi."), ("user", "Tea.")]),
        (
            "Buy.",
            [{"role": "assistant", "content": "What?"}, {"role": "user", "content": "Tea."}],
            [("user", "Buy."), ("assistant", "What?"), ("user", "Tea.")],
        ),
    ],
)
async def test_what_reset_returns_is_put_behind_the_prompt(play, prompt, said, messages):
    row = ROWS[0] | {"said": said}
    row = row | {"prompt": prompt} if prompt else {key: value for key, value in row.items() if key != "prompt"}
    (rollout,) = await play(["done"], Graded, rows=[row])
    *heard, reply = [(message.role, message.content) for message in rollout.trace.messages]
    assert heard == messages and reply == ("assistant", "done") and rollout.reward == 1.0


async def test_it_ends_after_max_turns_and_is_graded(play):
    (rollout,) = await play([call("buy", price=1)] * 9, max_turns=5)
    assert rollout.error is None and rollout.trace.num_turns == 5 and rollout.reward == 1.0
    assert rollout.trace.stop_condition == "max_turns"


SOURCE = """
import asyncio, time
class Env:
    def __init__(self): {init}
    def reset(self, row): {reset}
    def act(self) -> str:
        "Act."
        {act}
    def reward(self): {reward}
"""
WELL = {"init": "pass", "reset": "pass", "act": "pass", "reward": "return 1"}


@pytest.mark.parametrize(
    ("bodies", "reason"),
    [
        ({"init": "1 / 0"}, "Env.__init__ failed: ZeroDivisionError: division by zero"),
        ({"reset": "row['x']"}, "Env.reset failed: KeyError: 'x'"),
        ({"reset": "return 3"}, "Env.reset failed: TypeError"),
        ({"reset": "return [{'role': 'nobody'}]"}, "Env.reset failed: ValidationError"),
        ({"reset": "raise TimeoutError('of its own')"}, "Env.reset failed: TimeoutError: of its own"),
        ({"reward": "self.x"}, "Env.reward failed: AttributeError"),
        ({"reward": "return None"}, "Env.reward failed: TypeError"),
        ({"reward": "return float('nan')"}, "the grader gave reward nan"),
        ({"reward": "return [1, 2, 3]"}, "reward returned 3 rewards for 2 turns"),
        ({"reward": "raise SystemExit"}, "Env.reward failed: RuntimeError: the env's code let SystemExit escape"),
        ({"act": "time.sleep(60)"}, "not finished after 0.2 s"),
        ({"reset": "time.sleep(60)"}, "not finished after 0.2 s"),
    ],
)
async def test_an_episode_fails_with_the_method_and_the_reason(play, module, bodies, reason):
    module(SOURCE.format(**WELL | bodies))
    started = time.monotonic()
    timeout_s = 0.2 if "time.sleep" in str(bodies) else 15  # a busy machine takes longer for the others
    (rollout,) = await play([call("act"), "x"], "package_of_tests.tasks.Env", config={"timeout_s": timeout_s})
    assert reason in str(rollout.error) and time.monotonic() - started < 20


async def test_rewards_by_turn(play, module):
    module(SOURCE.format(**WELL | {"reward": "return [0.25, 0.5]"}))
    (rollout,) = await play([call("act"), "x"], "package_of_tests.tasks.Env")
    assert rollout.reward == 0.75 and [turn.reward for turn in rollout.turns] == [0.25, 0.5]


async def test_a_method_that_blocks_does_not_hold_up_others(env_of, scripted, module):
    module(SOURCE.format(**WELL | {"act": "time.sleep(0.6)"}))
    environment = env_of("package_of_tests.tasks.Env")
    late = []

    async def beat():
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - before)

    async with environment.serving():
        beating = asyncio.create_task(beat())
        await environment.play(environment.tasks[0], 8, scripted([call("act"), "x"]), group_id=0)
        beating.cancel()
    assert len(late) >= 5 and max(late) < 0.5


async def test_it_is_played_in_the_run_wherever_graders_run(play):
    (rollout,) = await play(
        [call("buy", price=5), "x"], config={"in_process": False, "workers": WorkersConfig(count=1)}
    )
    assert rollout.error is None and rollout.reward == 1.0 and rollout.metrics["tool_calls"] == 1


# --- refusals ---------------------------------------------------------------------------------------------------------

USABLE = """
class Env:
    def reset(self, row): pass
    def act(self, what: str) -> str:
        "Act."
    def reward(self): return 1
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("reward(self): return 1", "_reward(self): return 1", "Env needs a method reward(self)"),
        ("reward(self): return 1", "reward(self, *, trace): pass", "Env needs a method reward"),
        ("reward(self)", "reward(self, trace, task)", "Env needs a method reward"),
        ("reset(self, row): pass", "_reset(self, row): pass", "Env needs a method reset(self, row)"),
        ("reset(self, row)", "reset(self, **columns)", "Env needs a method reset"),
        ("def act", "def _act", "Env has no tool"),
        ('"Act."', "pass", "Env.act is a tool and needs a docstring"),
        (
            "what: str",
            "what",
            "Env.act: a model gives arguments by name and type (text: str), which what does not take",
        ),
        ("what: str", "*what: str", "which *what: str does not take"),
        ("what: str", "**what: str", "which **what: str does not take"),
        ("what: str", "what: str, /", "which what: str does not take"),
        ("what: str", "_what: str", "which _what: str does not take"),
        ("what: str", "what: 'Unknown'", "Env.act: name 'Unknown' is not defined"),
        ("what: str", "what: memoryview", "Env.act: Unable to generate pydantic-core schema"),
        ("def act", "def aktör", "Env.aktör is a tool and needs"),
        ("def act(self, what: str)", "def rows(self)", "Env.rows yields the tasks"),
        ("class Env", "def Env(): pass\nclass Other", "is not a class that is made without arguments"),
        (
            "reset(self, row)",
            "__init__(self, size): pass\n    def reset(self, row)",
            "is not a class that is made without",
        ),
        ("def act", "1 / 0\n    def act", "ZeroDivisionError"),
    ],
)
def test_a_class_that_cannot_be_played_is_refused(module, refused, old, new, named):
    assert USABLE.count(old) == 1
    message = refused("prl.envs.tasksets.tools", {"env": f"{module(USABLE.replace(old, new))}.Env", "path": "x.jsonl"})
    assert message.startswith("envs.mine.args") and named in message


@pytest.mark.parametrize("env", ["no_such_shop.Shop", "json.Shop", "Shop", 3])
def test_a_name_that_leads_to_no_class_is_refused(refused, env):
    message = refused("prl.envs.tasksets.tools", {"env": env, "path": "rows.jsonl"})
    assert message.startswith("envs.mine.args.env: ") and str(env).partition(".")[0] in message


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ('{"prompt": "a"}\n3', "line 2: a row is a mapping"),
        ('{"prompt": 3}', "line 1: a row is a mapping, its prompt a text or messages"),
        ('{"prompt": [{"role": "x"}]}', "line 1: a row is a mapping, its prompt a text or messages"),
        ("{", "line 1 is not JSON"),
    ],
)
def test_a_row_that_cannot_be_played_is_refused(refused, tmp_path, rows, named):
    (tmp_path / "rows.jsonl").write_text(rows)
    args = {"env": f"{__name__}.Shop", "path": str(tmp_path / "rows.jsonl")}
    assert named in refused("prl.envs.tasksets.tools", args)


def test_without_rows_it_is_refused(refused):
    message = refused("prl.envs.tasksets.tools", {"env": f"{__name__}.Shop"})
    assert message.endswith("set path, or give Shop a static method rows()")


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(**options):
    taskset = ToolsTaskset(ToolsConfig(env=f"{__name__}.Endless", **options))
    return [task.data.row for task in taskset]


@pytest.fixture
def few(monkeypatch):
    """As many rows are read of a class as are enough for a test."""
    monkeypatch.setattr("prl.envs.tasksets.tools.MOST", 100)


class Endless(Shop):
    @staticmethod
    def rows():
        number = 0
        while True:
            number += 1
            yield {"number": number % 20}


def test_rows_of_the_class_are_divided_by_their_content(few):
    train, held_out = rows_of(), rows_of(split="eval")
    assert sorted(row["number"] for row in train + held_out) == list(range(20)) and len(held_out) == 2
    assert rows_of(seed=1) != train and sorted(map(str, rows_of(seed=1))) == sorted(map(str, train))
    assert len(rows_of(num_tasks=5)) == 5 and len(rows_of(eval_fraction=0)) == 20


def test_held_out_rows_of_a_file_are_not_trained_on(few, tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"number": 3}\n{"number": 99}\n')
    options = {"eval_path": str(tmp_path / "eval.jsonl")}
    assert sorted(row["number"] for row in rows_of(split="eval", **options)) == [3, 99]
    assert sorted(row["number"] for row in rows_of(**options)) == [n for n in range(20) if n != 3]
