"""gsm8k: `jsonl` with the data set's keys; what is graded is the number of each worked solution."""

import json

import pytest

from prl.envs.environment import promises_to_be_quick
from prl.envs.tasksets.gsm8k import GSM8KConfig, GSM8KTaskset


@pytest.fixture
def tasks(tmp_path):
    """`tasks(rows, **settings)`: the tasks of a file of (question, answer)."""

    def make(*rows, **settings):
        path = tmp_path / "mine.jsonl"
        lines = [
            json.dumps({"question": question, "answer": answer, "source": "left alone"}) for question, answer in rows
        ]
        path.write_text("\n".join(lines))
        return list(GSM8KTaskset(GSM8KConfig(path=str(path), **settings)))

    return make


@pytest.mark.parametrize(("answer", "number"), [("10 * 2\n#### 1,020", "1020"), ("1/2\n#### .5", "0.5"), ("4", "4")])
def test_answer_is_the_number_behind_the_marks(tasks, answer, number):
    (task,) = tasks(("How much?", answer))
    assert (task.data.prompt, task.data.answer, task.data.demonstration) == ("How much?", number, answer)


@pytest.mark.parametrize(("reply", "reward"), [("#### 4", 1.0), ("#### 5", 0.0), (None, 0.0)])
def test_reward_and_metric_are_recorded(tasks, graded, reply, reward):
    trace = graded(*tasks(("3 pens and one?", "3 + 1 = <<3+1=4>>4\n#### 4")), reply)
    assert trace.reward == reward and trace.metrics == {"correct": reward}


def test_a_tenth_of_a_file_is_held_out(tasks):
    rows = [(f"{n} pens and one?", f"#### {n + 1}") for n in range(40)]
    train, held_out = ({task.data.prompt for task in tasks(*rows, split=split)} for split in ("train", "eval"))
    assert len(train) == 36 and len(held_out) == 4 and not train & held_out


def test_math_verify_grades_in_a_process_of_its_own(tasks):
    (task,) = tasks(("Half?", "#### .5"), grader="math_verify")
    assert [task.grade(reply) for reply in ("\\boxed{\\frac{2}{4}}", "\\boxed{2}")] == [1.0, 0.0]
    grades_here = [
        promises_to_be_quick(GSM8KTaskset(GSM8KConfig(grader=grader))) for grader in ("math_verify", "numeric")
    ]
    assert grades_here == [False, True]
