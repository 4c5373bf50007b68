"""`prl env check`: an env of every kind is loaded and played as in a run; what is wrong is told with its line."""

import json
import os
import re
import sys

import pytest

from prl.launch.command import FULL_ERROR
from prl.tools import env_check as env

TASKSET = """
import verifiers.v1 as vf
__all__ = ["T"]
class Data(vf.TaskData):
    answer: str
class Task(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        print("graded", trace.last_reply)
        return float(trace.last_reply == self.data.answer) / {divisor}
class Config(vf.TasksetConfig):
    words: list[str] = ["ab"]
class T(vf.Taskset[Task, Config]):
    def load(self):
        for word in self.config.words:
            yield Task(Data(prompt=word[{index}] + "?", answer=word))
"""


@pytest.fixture
def prl_env(monkeypatch, capsys):
    """`prl_env(*arguments)`: exit status, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prl env", *arguments])
        monkeypatch.delenv(FULL_ERROR, raising=False)  # of tests that ran in this process
        status = 0
        try:
            env.main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    """`taskset(name, **parts)`: an importable module with a taskset."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name, divisor="1", index="0"):
        (tmp_path / f"{name}.py").write_text(TASKSET.format(divisor=divisor, index=index))
        return name

    return make


def test_a_single_turn_is_played_with_the_tasks_answer(prl_env):
    status, out, _ = prl_env("check", "math", "args.num_tasks=7", "args.operations=['+']", "eval_args.num_tasks=3")
    assert status == 0 and "env math: 7 tasks, 3 held-out tasks" in out
    assert "<|im_start|>user\n" in out and "+" in out and "the task's answer" in out and "reward 1 (answer 1)" in out
    assert "no model" in out and "frozen" not in out
    status, out, _ = prl_env("check", "math", "args.num_tasks=7", "--reply", "x")
    assert status == 0 and "reward 0 (answer 0)" in out and "assistant  x" in out


def test_first_row_is_shown_as_it_was_read(prl_env, tmp_path):
    talk = [
        {"role": "system", "content": "Be\x1b[31m brief."},
        {"role": "user", "content": "q" * 1000},
        {"role": "assistant", "content": "Yes."},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    _, out, _ = prl_env("check", "jsonl", f"args.path={tmp_path / 'a.jsonl'}", "eval_args=null")
    (rows,) = re.findall("as it was read:\n((?:  .*\n)*)", out)
    lines = [line.strip() for line in rows.splitlines()]
    assert lines[0] == r"system: Be\x1b[31m brief." and lines[1].startswith("user: qqq") and len(lines[1]) < 450
    assert lines[2:] == ["demonstration: Yes.", "answer: none", "tools: none"]


def test_fields_of_a_taskset_of_the_users_own_keep_their_meaning(prl_env, tmp_path, monkeypatch):
    fields = "answer: str\n    tools: list[str] = ['hammer']\n    demonstration: dict = {'by': 'hand'}"
    (tmp_path / "own_fields.py").write_text(TASKSET.format(divisor="1", index="0").replace("answer: str", fields))
    monkeypatch.syspath_prepend(str(tmp_path))
    status, out, _ = prl_env("check", "own_fields")
    assert status == 0 and "demonstration: none\n  answer: ab\n  tools: none\n" in out and "# Tools" not in out


def test_conversation_is_played_reply_by_reply(prl_env):
    status, out, _ = prl_env("check", "guess", "args.num_tasks=5", "eval_args=null", "--reply", "what", "--reply", "0")
    assert status == 0 and "no held-out tasks" in out
    assert out.index("assistant  what") < out.index("a number") < out.index("assistant  0") < out.index("higher")
    assert "reward 0 (found 0)" in out and "guesses" in out


def test_tools_are_called(prl_env):
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6*7"}}\n</tool_call>'
    status, out, _ = prl_env(
        "check", "calculator", "args.num_tasks=5", "eval_args=null", "--reply", call, "--reply", "42"
    )
    assert status == 0 and "calculate" in out and "assistant  42" in out and "tool_calls 1" in out
    assert "# Tools" in out, "the model is told of them"


def test_each_of_two_agents_has_its_rollout(prl_env):
    status, out, _ = prl_env("check", "kuhn_poker", "--reply", "bet", "--reply", "fold")
    assert status == 0 and "agent player" in out and "agent opponent" in out
    assert "reward 0.75 (chips 0.75)" in out and "reward 0.25 (chips 0.25)" in out


def test_a_taskset_of_the_users_own_and_its_settings(prl_env, taskset):
    name = taskset("env_check_fine")
    status, out, _ = prl_env("check", name, "args.words=[cd, ef]")
    assert status == 0 and "env check: 2 tasks, no held-out tasks" in out and "c?" in out and "reward 1" in out
    assert "\nenv check printed: graded cd\n" in out, "what the grader says, which runs elsewhere"


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    return f"args.path={path}"


@pytest.mark.parametrize(
    ("model", "verdicts", "reward"),
    [
        ("{name: teacher}", [], "reward 1 "),
        ("{name: teacher}", ["No.\nScore: 3"], "reward 0.3 "),
        ("policy", ["Score: 4"], "reward 0.4 "),
        ("{name: large, base_url: 'http://127.0.0.1:9/v1'}", ["Score: 5"], "reward 0.5 "),
    ],
)
def test_a_judge_says_what_is_given_for_it(prl_env, rows, model, verdicts, reward):
    given = [part for verdict in verdicts for part in ("--judge", verdict)]
    status, out, err = prl_env("check", "judge", rows, "eval_args=null", f"models.judge={model}", *given)
    assert status == 0, err
    assert reward in out and "assistant  4" in out


def test_a_judge_with_an_address_is_asked_there(prl_env, rows):
    model = "{name: large, base_url: 'http://127.0.0.1:9/v1', timeout_s: 0.2}"
    status, _, err = prl_env("check", "judge", rows, "eval_args=null", f"models.judge={model}")
    assert status == 2 and "127.0.0.1:9" in err


SERVED = """
import verifiers.v1 as vf
__all__ = ["T"]
class Shelf(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shelf"
    @vf.tool
    def look(self, at: int) -> str:
        "Look at a place."
        return f"a lamp at {at}"
class Config(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig()
class Task(vf.Task[vf.TaskData, vf.State, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(vf.ToolsetConfig())]
    @vf.reward
    async def judged(self, trace: vf.Trace) -> float:
        verdict = await vf.Judge(self.config.judge).complete(trace.last_reply, trace=trace)
        return float(verdict.text == "FINE")
class T(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="What is at 1?"), Config())
if __name__ == "__main__":
    Shelf.run()
"""


@pytest.mark.slow
def test_tools_in_processes_and_judges_of_verifiers_are_played(prl_env, tmp_path, monkeypatch):
    (tmp_path / "env_check_served.py").write_text(SERVED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    call = '<tool_call>\n{"name": "shelf_look", "arguments": {"at": 1}}\n</tool_call>'
    status, out, err = prl_env("check", "env_check_served", "--reply", call, "--reply", "A lamp.", "--judge", "FINE")
    assert status == 0, err
    assert "reward 1 (judged 1)" in out and "a lamp at 1" in out and "assistant  A lamp." in out
    assert out.index("shelf_look(at=1)") < out.index("a lamp at 1") < out.index("assistant  A lamp.")


class Forms:
    """Envs in the forms that published ones have, each with replies and what is shown of its episode."""

    user_without_prompt = (
        """
class Task(vf.Task):
    @vf.reward
    async def by_turn(self, trace: vf.Trace) -> list[float]:
        return [float(message.content == "yes") for message in trace.assistant_messages]
    @vf.metric
    async def counts(self, trace: vf.Trace) -> dict[str, float]:
        return {"turns_played": trace.num_turns, "words": len(trace.last_reply.split())}
class Env(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            for words in ("Ready?", [{"role": "user", "content": [{"type": "text", "text": "Sure?"}]}]):
                await talk.turn(words)
class T(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt=None, system_prompt="Say yes."))
""",
        ["no", "yes"],
        ["Ready?", "Sure?", "reward 1 (by_turn 1)", "turns_played 2", "words 1"],
    )
    task_of_the_other_agents_making = (
        """
class Solve(vf.Task):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "4")
class Config(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
class Env(vf.Env[Config]):
    async def run(self, task, agents):
        proposed = await agents.proposer.run(task)
        for _ in range(2):
            await agents.solver.run(Solve(vf.TaskData(prompt=proposed.last_reply)))
    async def finalize(self, task, episode):
        solved = [trace.reward for trace in episode.traces if trace.agent.name == "solver"]
        rate = sum(solved) / len(solved)
        for trace in episode.traces:
            if trace.agent.name == "proposer":
                trace.record_reward("learnability", 4 * rate * (1 - rate))
                trace.record_metric("solve_rate", rate)
class T(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="Invent a sum."))
""",
        ["2+2=", "4", "5"],
        ["reward 1 (learnability 1)", "solve_rate 0.5", "reward 1 (correct 1)", "reward 0 (correct 0)"],
    )
    siblings_compared = (
        """
class Config(vf.EnvConfig):
    golfer: vf.AgentConfig = vf.AgentConfig()
class Env(vf.Env[Config]):
    async def run(self, task, agents):
        for _ in range(3):
            await agents.golfer.run(task)
    async def finalize(self, task, episode):
        shortest = min(len(trace.last_reply) for trace in episode.traces)
        for trace in episode.traces:
            trace.record_reward("concise", float(len(trace.last_reply) == shortest))
class T(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="Be brief."))
""",
        ["some words", "no", "several words"],
        ["reward 0 (concise 0)", "reward 1 (concise 1)"],
    )
    history_compacted = (
        """
class Env(vf.SingleAgentEnv):
    async def run(self, task, agents):
        notes = task
        for _ in range(3):
            trace = await agents.agent.run(notes)
            notes = task.with_data(prompt=f"Notes: {trace.last_reply}")
class T(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="Count on."))
""",
        ["one", "two", "three"],
        ["user       Count on.", "user       Notes: one", "user       Notes: two", "assistant  three"],
    )


@pytest.mark.parametrize("form", [name for name in vars(Forms) if not name.startswith("_")])
def test_published_forms_of_envs_are_played(prl_env, tmp_path, monkeypatch, form):
    source, replies, shown = getattr(Forms, form)
    (tmp_path / f"form_{form}.py").write_text(f'import verifiers.v1 as vf\n__all__ = ["T", "Env"]\n{source}')
    monkeypatch.syspath_prepend(str(tmp_path))
    status, out, err = prl_env("check", f"form_{form}", *(part for reply in replies for part in ("--reply", reply)))
    assert status == 0, err
    assert [part for part in shown if part not in out] == []


INTERCEPTED = """
import verifiers.v1 as vf
__all__ = ["T"]
class Task(vf.Task):
    @vf.stop
    def forbidden(self, response: vf.Response) -> bool:
        return "STOP" in (response.message.content or "")
    @vf.intercept
    def noted(self, response: vf.Response, trace: vf.Trace) -> None:
        trace.record_metric("noted", 1.0)
    @vf.reward
    async def stopped(self, trace: vf.Trace) -> float:
        return float(trace.stop_condition == "forbidden")
class T(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="Say STOP."))
"""


@pytest.mark.parametrize(("reply", "reward"), [("STOP", 1), ("go", 0)])
def test_hooks_on_replies_are_played(prl_env, tmp_path, monkeypatch, reply, reward):
    (tmp_path / "env_check_intercepted.py").write_text(INTERCEPTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, out, err = prl_env("check", "env_check_intercepted", "--reply", reply)
    assert f"reward {reward} (stopped {reward})" in out, err
    assert "noted 1" in out and status == 0


@pytest.mark.parametrize(
    ("name", "broken", "says", "line"),
    [
        ("env_check_grader", {"divisor": "0"}, "ZeroDivisionError: float division by zero", '.py", line 10'),
        ("env_check_load", {"index": "5"}, "loading the tasks of T failed: IndexError", ".py, line 16"),
    ],
)
def test_an_error_in_user_code_names_its_line(prl_env, taskset, tmp_path, name, broken, says, line):
    status, _, err = prl_env("check", taskset(name, **broken))
    assert status == 2 and says in err and f"{tmp_path / name}{line}" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no_such_taskset_xyz"], "no_such_taskset_xyz"),
        (["math", "args.max_operant=3"], "envs.math.args.max_operant"),
        (["math", "weight=-1x"], "weight"),
        (["mth"], "taskset='mth'"),
        (["math,guess"], "taskset='math,guess'"),
        (["math", "args.system=héllo"], "args.system=héllo"),
        (["jsonl"], "envs.jsonl.args.path"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_a_line(prl_env, arguments, named):
    status, out, err = prl_env("check", *arguments)
    assert status == 2 and out == "" and err.startswith("error: ") and named in err and len(err.splitlines()) == 1
