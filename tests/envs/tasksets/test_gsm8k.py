"""gsm8k: its reading of numbers by hand, its sources (files, folders, the hub's cache, no hub), its two splits."""

import json
import time
from pathlib import Path

import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from prl.config.schema import EnvConfig
from prl.envs.environment import Environment
from prl.envs.tasksets.gsm8k import GSM8KConfig, GSM8KTaskset
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


@pytest.mark.parametrize(("reply", "reward"), [("#### 4", 1.0), ("#### 5", 0.0), (None, 0.0)])
def test_reward_and_metric_are_recorded(tmp_path, graded, reply, reward):
    jsonl(tmp_path / "test.jsonl", problems([3]))
    [task] = tasks(path=str(tmp_path), split="eval")
    trace = graded(task, reply)
    assert trace.reward == reward and trace.metrics == {"correct": reward}


@pytest.mark.parametrize(("answer", "number"), [("10 * 2\n#### 1,020", "1020"), ("1/2\n#### .5", "0.5")])
def test_a_task_is_the_question_and_the_number_behind_the_marks(tmp_path, answer, number):
    jsonl(tmp_path / "test.jsonl", [{"question": "How much?", "answer": answer, "source": "left alone"}])
    [task] = tasks(path=str(tmp_path), split="eval")
    assert (task.data.prompt, task.data.answer, task.data.demonstration) == ("How much?", number, answer)


@pytest.mark.parametrize(("write", "suffix"), [(jsonl, "jsonl"), (parquet, "parquet")])
def test_a_single_file_is_split_by_content(tmp_path, write, suffix):
    path = str(write(tmp_path / f"mine.{suffix}", problems(range(400)) + problems(range(5))))
    train, held = ({task.data.prompt for task in tasks(path=path, split=split)} for split in ("train", "eval"))
    assert not train & held
    assert train | held == {f"{n} pens and one?" for n in range(400)}
    assert 20 < len(held) < 60


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


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """An empty cache, and a hub that refuses every connection."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def test_without_hub_and_file_it_says_so_at_once(no_hub):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"^envs\.g\.args: openai/gsm8k .* set path to a \.jsonl") as caught:
        Environment("g", EnvConfig(taskset="prl.envs.tasksets.gsm8k"), eval_tasks=0)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 5


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
        ("mine.jsonl", '{"question": "q", "answer": ' + "9" * 5000 + "}", "line 1 is not JSON"),
        ("mine.csv", "q,4", "neither a .jsonl or .parquet file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    config = EnvConfig(taskset="prl.envs.tasksets.gsm8k", args={"path": str(tmp_path / name)})
    with pytest.raises(ConfigError, match=said):
        Environment("g", config, eval_tasks=0)


def test_math_verify_grades_where_it_is_chosen_and_in_a_process_of_its_own(tmp_path):
    path = jsonl(tmp_path / "test.jsonl", [{"question": "Half?", "answer": "#### .5"}]).parent
    taskset = GSM8KTaskset(GSM8KConfig(path=str(path), split="eval", grader="math_verify"))
    (task,) = taskset
    assert [task.grade(reply) for reply in ("\\boxed{\\frac{2}{4}}", "\\boxed{2}")] == [1.0, 0.0]
    assert not taskset.IN_PROCESS and GSM8KTaskset(GSM8KConfig(path=str(path))).IN_PROCESS


def test_a_folder_without_training_problems_is_refused(tmp_path):
    jsonl(tmp_path / "test.jsonl", problems([1]))
    with pytest.raises(ValueError, match="has no train"):
        tasks(path=str(tmp_path))
