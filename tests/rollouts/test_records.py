"""Rollout files: all messages of a rollout, and why it was or was not trained."""

import json

import msgspec
import pytest
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage

from prl.rollouts import records
from prl.rollouts.records import write_records
from prl.rollouts.rollout import Rollout, Stage


@pytest.fixture
def make(talk, user, renderer, tokenizer):
    def build(reply="2", *, reward=0.5, version=2):
        fresh = type(talk)(renderer, tokenizer)
        fresh.turn([user("1+1=")], reply)
        fresh.trace.record_reward("answer", reward)
        fresh.trace.record_metric("correct", 1.0)
        rollout = Rollout(fresh.trace, env_name="toy", group_id=6, start_version=version, temperature=1.0)
        rollout.attach_samples()
        return rollout

    return build


def record(rollout, step):
    """The line of a rollout, read again."""
    return msgspec.json.decode(msgspec.json.encode(records.record(rollout, step)))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_holds_what_one_wants_to_see(make):
    rollout = make()
    rollout.assign_advantages(-0.25)
    rollout.end_version = 3
    rollout.leave(Stage.TRAINED)
    entry = record(rollout, step=4)
    assert entry == {
        "step": 4,
        "env": "toy",
        "agent": "agent",
        "task": 3,
        "group": 6,
        "rollout": 0,
        "reward": 0.5,
        "rewards": {"answer": 0.5},
        "metrics": {"correct": 1.0},
        "advantage": -0.25,
        "start_version": 2,
        "end_version": 3,
        "outcome": {"stage": "trained", "reason": "", "source": None},
        "matched": {},
        "difficulty_pool": None,
        "stop": None,
        "completion_tokens": 2,
        "samples": 1,
        "messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
    }


def test_each_outcome_is_recorded_as_it_is(make, tmp_path):
    trained, failed, filtered, same = [make(str(i)) for i in range(4)]
    trained.leave(Stage.TRAINED)
    failed.fail(TimeoutError("no answer in 60 s"))
    filtered.matched["post_batch"] = "zero_advantage"
    filtered.leave(Stage.POST_FILTERED, "filter zero_advantage", "zero_advantage")
    same.leave(Stage.DIFFICULTY, "online difficulty filtering: mean reward 1", "easy")
    same.difficulty_pool = "easy"
    write_records(tmp_path, 7, [trained, failed])
    write_records(tmp_path, 7, [filtered, same])  # appended
    write_records(tmp_path, 7, [make()], "eval_toy_")
    entries = read(tmp_path / "rollouts" / "step_000007.jsonl")
    assert [entry["messages"][-1]["content"] for entry in entries] == list("0123")
    assert [entry["outcome"] for entry in entries] == [
        {"stage": "trained", "reason": "", "source": None},
        {"stage": "failed", "reason": "TimeoutError: no answer in 60 s", "source": "timeout"},
        {"stage": "post_filtered", "reason": "filter zero_advantage", "source": "zero_advantage"},
        {"stage": "difficulty", "reason": "online difficulty filtering: mean reward 1", "source": "easy"},
    ]
    assert [entry["difficulty_pool"] for entry in entries] == [None] * 3 + ["easy"]
    assert entries[2]["matched"] == {"post_batch": "zero_advantage"}
    (entry,) = read(tmp_path / "rollouts" / "eval_toy_step_000007.jsonl")
    assert entry["outcome"] is None and entry["advantage"] is None, "null, not zero"


def test_half_characters_are_written_as_question_marks(make, tmp_path):
    odd, lost = make("1", version=None), make("3")
    odd.trace.record_reward("half \ud83d", 0.25)
    odd.trace.record_metric("other half \ude00", 2.0)
    odd.trace.agent.name = "opponent"
    lost.fail(ValueError("half \ud83d"))
    write_records(tmp_path, 1, [odd, lost])
    one, two = read(tmp_path / "rollouts" / "step_000001.jsonl")
    assert one["rewards"] == {"answer": 0.5, "half ?": 0.25} and one["reward"] == 0.75
    assert one["metrics"] == {"correct": 1.0, "other half ?": 2.0} and one["agent"] == "opponent"
    assert one["messages"] == [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "1"}]
    assert one["start_version"] is one["end_version"] is None, "of a frozen model"
    assert two["outcome"]["reason"] == "ValueError: half ?"


def test_an_answer_of_a_tool_names_the_tool(talk):
    call = ToolCall(id="7", name="calculate", arguments='{"expression": "1+1"}')
    asked = AssistantMessage(content=None, reasoning_content="hm", tool_calls=[call])
    answered = ToolMessage(tool_call_id="7", content="2", name="calculate")
    talk.trace.nodes = [MessageNode(message=asked, sampled=True), MessageNode(message=answered, parent=0)]
    rollout = Rollout(talk.trace, env_name="toy", group_id=0, start_version=0, temperature=1.0)
    assert record(rollout, step=1)["messages"] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning": "hm",
            "tool_calls": [{"name": "calculate", "arguments": '{"expression": "1+1"}'}],
        },
        {"role": "tool", "content": "2", "name": "calculate"},
    ]


def test_messages_of_a_broken_history_name_their_parents(talk, user):
    question, _ = talk.turn([user("1+1=")], "3")
    talk.turn([question, AssistantMessage(content="2"), user("and 2+2=")], "4")
    talk.turn([user("another agent")], "5")
    rollout = Rollout(talk.trace, env_name="toy", group_id=0, start_version=0, temperature=1.0)
    rollout.attach_samples()
    entry = record(rollout, step=1)
    assert entry["samples"] == 3
    assert entry["messages"] == [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "3"},
        {"role": "assistant", "content": "2", "after": 0, "sampled": False},
        {"role": "user", "content": "and 2+2="},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "another agent", "after": None},
        {"role": "assistant", "content": "5"},
    ]
