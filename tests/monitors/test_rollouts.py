"""What trackers show of a step's rollouts."""

import pytest

from prl.monitors.rollouts import COLUMNS, distributions, read_rollouts, rows
from prl.monitors.tensorboard import markdown
from prl.rollouts.record_lines import Message, Record, ToolCall
from prl.rollouts.rollout import Outcome, Stage

OF_GROUP = {"step": 5, "env": "math", "task": 3, "group": 7}
RECORDS = [
    Record(
        **OF_GROUP,
        reward=1.0,
        advantage=0.5,
        start_version=2,
        outcome=Outcome(Stage.TRAINED),
        completion_tokens=12,
        messages=[Message("user", "1+1="), Message("assistant", "2", tool_calls=[ToolCall("add", '{"a": 1}')])],
    ),
    Record(
        **OF_GROUP,
        reward=0.0,
        advantage=-0.5,
        start_version=4,
        outcome=Outcome(Stage.POST_FILTERED, "filter repetition", "repetition"),
        matched={"post_batch": "repetition"},
        completion_tokens=30,
        messages=[Message("assistant", "<script>alert(1)</script> | **2** [x](javascript:y)\nend")],
    ),
    Record(step=5, env="math", group=7, reward=0.0, start_version=4, outcome=Outcome(Stage.STALE), messages=[]),
    Record(step=5, env="b", group=8, reward=None, outcome=Outcome(Stage.FAILED, "no", "env"), messages=[]),
]


def test_distributions_by_hand():
    assert distributions(RECORDS) == {
        "reward/math": [1.0, 0.0, 0.0],
        "length/math": [12, 30, 0],
        "advantage/math": [0.5, -0.5],
        "off_policy/math": [2, 0],  # 5 - 1 - 2, 5 - 1 - 4; what never got into a batch has no age
    }
    assert distributions([]) == {}


def test_the_table_marks_what_a_filter_dropped():
    trained, dropped, *_ = rows(RECORDS)
    messages = 'user: 1+1=\nassistant: 2 add({"a": 1})'
    assert trained == ["math", "3", 7, 1.0, 0.5, "trained", "", 12, messages] and len(COLUMNS) == len(trained)
    assert dropped[5:7] == ["post_filtered", "post_batch: repetition"]


def test_markdown_of_what_a_model_wrote_is_text():
    table = markdown(rows(RECORDS))
    assert len(table.splitlines()) == 2 + len(RECORDS)
    assert not any(mark in table for mark in ("<script", "**", "](", "javascript:y)"))
    assert "&#60;script&#62;alert&#40;1&#41;" in table
    assert all(line.count("|") == len(COLUMNS) + 1 for line in table.splitlines())


@pytest.mark.parametrize("content", [None, b"", b'{"step": 1, "env"\n'])
def test_a_step_without_a_readable_line_has_no_rollouts(tmp_path, content):
    if content is not None:
        (tmp_path / "rollouts").mkdir()
        (tmp_path / "rollouts" / "step_000001.jsonl").write_bytes(content)
    assert read_rollouts(tmp_path, 1) == []
