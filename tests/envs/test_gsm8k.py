"""gsm8k: its reading of numbers by hand, its sources (files, folders, the hub's cache, no hub), its two splits."""

import asyncio
import json
import time
from pathlib import Path

import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.envs.base import held_out
from prl.envs.graders import numeric as grade
from prl.envs.gsm8k import GSM8KConfig, GSM8KTaskset
from prl.episodes.environment import Environment
from prl.errors import ConfigError


def tasks(**knobs) -> list:
    return list(GSM8KTaskset(GSM8KConfig(**knobs)))


def problems(numbers) -> list[dict[str, str]]:
    return [
        {"question": f"{n} pens and one?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
        for n in numbers
    ]


def jsonl(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    "reply",
    [
        "1234",
        "#### 1234",
        "####1,234",
        "5 + 6 ... so #### 1234 apples in 2 days",
        "#### 5\nno, #### 1234",
        "The answer is $1,234.00.",
        "so 1000 + 234 = 1234",
        "\\boxed{1234}",
        "\\boxed{\\$1{,}234}",
        "2000-766 = +1234",
        "it is 01234.",
        "(1234)",
        "1234%",
        "$$\\boxed{1,234}$$ for 3 pens",
        "1 234",
        "1.234e3",
        "\\boxed{x = 1000 + 234 = 1234 \\text{ pens}}",
    ],
)
def test_the_right_number_earns_everything(reply):
    assert grade(reply, "1234") == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "about that many",
        "####",
        "1234 ####",
        "#### none, 1234 ####",
        "1234 or 5",
        "-1234",
        "#### -1,234",
        "$-1234",
        "-$1234",
        "1234.5",
        "1234.0000000000000000000000001",
        "12345",
        "11,234",
        "1,2345",
        "1,23,4",
        "12 34",
        "0x4d2",
        "1233+1",
        "1.234e2",
        "١٢٣٤",
        "__import__('os')",
        "9" * 100_000,
        "1," * 50_000,
        "$" * 50_000,
        "#" * 50_000,
        ".1234",
        "1234.5.6",
        "12:1234",
        "." * 50_000,
        "1 " * 50_000,
        "1/" * 50_000,
        "1e" * 50_000,
        "1e" + "9" * 50_000,
        "\\boxed{" * 20_000,
        "\\frac{1" * 20_000,
        "\\frac{" + " " * 100_000,
        "a" * 100_000 + "^",
    ],
)
def test_anything_else_earns_nothing(reply):
    assert grade(reply, "1234") == 0.0


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("-5", "-5"),
        ("-$5", "-5"),
        ("= -5.0", "-5"),
        ("10-5", "5"),
        ("x-5", "5"),
        ("0.50", "0.5"),
        ("#### 1,000,000", "1000000"),
        ("#### .5", "0.5"),
        ("0.5", ".5"),
        ("\\boxed{.5}", "0.5"),
        ("it costs $.50.", "0.5"),
        ("-.5", "-0.5"),
        ("-$.5", "-0.5"),
        ("10-.5", "0.5"),
        ("1 or .5", "0.5"),
        ("so it is 5.", "5"),
        ("#### 5. 6", "5"),
        ("That is all of it.5", "5"),
        ("f(x).5", "5"),
        ("...5", "5"),
    ],
)
def test_minus_decimals_and_thousands(reply, answer):
    assert grade(reply, answer) == 1.0


@pytest.mark.parametrize(("reply", "reward"), [("#### 4", 1.0), ("#### 5", 0.0), (None, 0.0)])
def test_score_records_reward_and_metric(tmp_path, reply, reward):
    jsonl(tmp_path / "test.jsonl", problems([3]))
    (task,) = tasks(path=str(tmp_path), split="eval")
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[vf.MessageNode(message=vf.AssistantMessage(content=reply), sampled=True)],
    )
    asyncio.run(task.score(trace))
    assert trace.reward == reward
    assert trace.metrics == {"correct": reward}


def test_a_task_is_the_question_and_the_number_behind_the_marks(tmp_path):
    rows = [{"question": "How much?", "answer": "10 * 2\n#### 1,020", "source": "left alone"}]
    jsonl(tmp_path / "test.jsonl", rows)
    (task,) = tasks(path=str(tmp_path), split="eval")
    assert (task.data.prompt, task.data.answer) == ("How much?", "1020")
    assert task.data.demonstration == rows[0]["answer"] and task.data.system_prompt is None


@pytest.mark.parametrize(("write", "suffix"), [(jsonl, "jsonl"), (parquet, "parquet")])
def test_a_single_file_is_split_by_content(tmp_path, write, suffix):
    path = str(write(tmp_path / f"mine.{suffix}", problems(range(400)) + problems(range(5))))
    train, held = ({task.data.prompt for task in tasks(path=path, split=split)} for split in ("train", "eval"))
    assert not train & held
    assert train | held == {f"{n} pens and one?" for n in range(400)}
    assert 20 < len(held) < 60


def test_the_split_is_pinned():
    assert [n for n in range(40) if held_out(f"{n} pens and one?")] == [9, 23, 24]


@pytest.mark.parametrize("under", [".", "main"])
@pytest.mark.parametrize(("write", "suffix"), [(jsonl, "jsonl"), (parquet, "parquet")])
def test_a_folder_is_split_by_its_files_and_none_is_in_both(tmp_path, under, write, suffix):
    write(tmp_path / under / f"train-00000-of-00002.{suffix}", problems(range(10)))
    write(tmp_path / under / f"train-00001-of-00002.{suffix}", problems(range(10, 20)))
    write(tmp_path / under / f"test-00000-of-00001.{suffix}", problems(range(18, 25)))
    train, held = (
        sorted(int(task.data.answer) - 1 for task in tasks(path=str(tmp_path), split=s)) for s in ("train", "eval")
    )
    assert train == list(range(18)) and held == list(range(18, 25))


def test_num_tasks_and_seed_choose(tmp_path):
    path = str(jsonl(tmp_path / "mine.jsonl", problems(range(100))))
    chosen = [[task.key for task in tasks(path=path, seed=seed, num_tasks=9)] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert {len(set(keys)) for keys in chosen} == {9}


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """An empty cache, and a hub that refuses every connection."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def test_without_hub_and_file_it_says_so_at_once(no_hub):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"^envs\.g\.args: openai/gsm8k .* set path to a \.jsonl") as caught:
        Environment("g", EnvConfig(taskset="prl.envs.gsm8k"), eval_tasks=0)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 5


def test_what_is_in_the_hubs_cache_needs_no_hub(no_hub):
    stored = no_hub / "datasets--openai--gsm8k"
    parquet(stored / "snapshots" / "abc" / "main" / "train-00000-of-00001.parquet", problems(range(30)))
    parquet(stored / "snapshots" / "abc" / "main" / "test-00000-of-00001.parquet", problems(range(30, 37)))
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    config = EnvConfig(taskset="prl.envs.gsm8k", args={"num_tasks": 20}, eval_args={"split": "eval"})
    environment = Environment("g", config, eval_tasks=100)
    assert (len(environment.tasks), len(environment.eval_tasks)) == (20, 7)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("mine.jsonl", '{"question": "q", "answer": "4"}\n{"question": "q"}\n', "mine.jsonl, row 2: a row needs"),
        ("mine.jsonl", '{"question": "q", "answer": "four"}\n', "row 1: a row needs"),
        ("mine.jsonl", '{"question": "q", "answer": "#### 17:30"}\n', "row 1: a row needs"),
        ("mine.jsonl", '["q", "4"]\n', "row 1: a row needs"),
        ("mine.jsonl", '{"question": "q", "answer": "4"}\n\n{"question', "line 3 is not JSON"),
        ("mine.jsonl", "", "has no task"),
        ("mine.parquet", "PAR1", "mine.parquet|[Pp]arquet"),
        ("mine.csv", "q,4", "neither a .jsonl or .parquet file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    config = EnvConfig(taskset="prl.envs.gsm8k", args={"path": str(tmp_path / name)})
    with pytest.raises(ConfigError, match=said):
        Environment("g", config, eval_tasks=0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "caf\xe9?", "answer": "4"}'.encode("latin-1"), "can't decode byte 0xe9"),
        (b'{"question": ' + b"[" * 100_000, "recursion"),
        (b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "4300 digits"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, said):
    (tmp_path / "mine.jsonl").write_bytes(b'{"question": "q", "answer": "4"}\n\n' + line + b"\n")
    config = EnvConfig(taskset="prl.envs.gsm8k", args={"path": str(tmp_path / "mine.jsonl")})
    with pytest.raises(ConfigError, match=rf"^envs\.g\.args: .*mine\.jsonl, line 3 is not JSON in UTF-8: .*{said}"):
        Environment("g", config, eval_tasks=0)


def test_an_answer_may_begin_with_its_point(tmp_path):
    jsonl(tmp_path / "test.jsonl", [{"question": "Half?", "answer": "1/2\n#### .5"}])
    assert [task.data.answer for task in tasks(path=str(tmp_path), split="eval")] == ["0.5"]


def test_math_verify_grades_where_it_is_chosen_and_in_a_process_of_its_own(tmp_path):
    path = jsonl(tmp_path / "test.jsonl", [{"question": "Half?", "answer": "#### .5"}]).parent
    taskset = GSM8KTaskset(GSM8KConfig(path=str(path), split="eval", grader="math_verify"))
    (task,) = taskset
    assert [task.grade(reply) for reply in ("\\boxed{\\frac{2}{4}}", "\\boxed{2}")] == [1.0, 0.0]
    assert not taskset.IN_PROCESS and GSM8KTaskset(GSM8KConfig(path=str(path))).IN_PROCESS


def test_a_path_that_is_not_there_or_half_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="neither a .jsonl or .parquet file nor a folder"):
        tasks(path=str(tmp_path / "nowhere.jsonl"))
    jsonl(tmp_path / "test.jsonl", problems([1]))
    with pytest.raises(ValueError, match="has no train"):
        tasks(path=str(tmp_path))
