"""What a row of each layout becomes without an option: prompt, reply to imitate, answer, tools."""

import json
import warnings

import pyarrow
import pyarrow.parquet
import pytest

from prl.envs.environment import load_taskset, take_tasks

ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKING = "add call00000 {'a': 1}"
"""How `spelt` writes `CALL` once it has an id."""


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


def spelt(messages):
    """Messages as one text: `user q`, and of a call its name, id and arguments."""
    parts = []
    for message in messages:
        calls = [
            f"{call['function']['name']} {call['id']} {json.loads(call['function']['arguments'])}"
            for call in message.get("tool_calls") or ()
        ]
        said = [message["role"], message.get("content") or "", *calls, message.get("tool_call_id") or ""]
        parts.append(" ".join(filter(None, said)))
    return " / ".join(parts)


def read(path, **args):
    """Prompt, demonstration and answer of each task, and the names of its tools."""
    from verifiers.v1.dialects.chat import message_to_wire

    settings = {"path": str(path), "eval_fraction": 0, **args}
    found = []
    for task in take_tasks(load_taskset("prl.envs.tasksets.jsonl", settings, "envs.e.args"), 100, "envs.e.args"):
        prompt, reply = task.data.prompt, task.data.demonstration
        prompt = prompt if isinstance(prompt, str) else spelt(map(message_to_wire, prompt))
        reply = spelt(reply) if isinstance(reply, list) else reply
        found.append((prompt, reply, task.data.answer, task.data.tools))
    return sorted(found, key=lambda task: len(task[0]))


LAYOUTS = {
    "prompt, completion": ({"prompt": "q", "completion": "a"}, "q", "a", ""),
    "prompt, completion, messages": (
        {"prompt": [user("q")], "completion": [says("a")], "note": 3},
        "user q",
        "assistant a",
        "",
    ),
    "prompt, completion, a tool between": (
        {
            "prompt": [user("q")],
            "completion": [says(None, tool_calls=[CALL]), {"role": "tool", "content": "2"}, says("a")],
        },
        f"user q / assistant {ASKING} / tool 2 call00000",
        "assistant a",
        "",
    ),
    "prompt, answer": ({"prompt": "q", "answer": 7}, "q", None, "7"),
    "prompt, completion, answer": ({"prompt": "q", "completion": "a", "answer": "7"}, "q", "a", "7"),
    "prompt alone": ({"prompt": "q"}, "q", None, ""),
    "messages": ({"messages": [user("q"), says("a")]}, "user q", "assistant a", ""),
    "messages, two turns, empty system": (
        {"messages": [{"role": "system", "content": ""}, user("q"), says("a"), user("r"), says("b")]},
        "system / user q / assistant a / user r",
        "assistant b",
        "",
    ),
    "messages, no reply": ({"messages": [user("q")], "answer": "7"}, "user q", None, "7"),
    "messages, the user last, an answer": (
        {"messages": [user("q"), says("a"), user("r")], "answer": "7"},
        "user q / assistant a / user r",
        None,
        "7",
    ),
    "messages, completion": ({"messages": [user("q")], "completion": "a"}, "user q", "assistant a", ""),
    "messages as JSON": ({"messages": json.dumps([user("q"), says("a")])}, "user q", "assistant a", ""),
    "messages of parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, says("a")]},
        "user q",
        "assistant a",
        "",
    ),
    "messages beside a prompt": ({"prompt": "q", "messages": [user("q"), says("a")]}, "user q", "assistant a", ""),
    "a prompt with an answer beside messages": (
        {"prompt": "q", "answer": "7", "messages": [user("r"), says("a")]},
        "q",
        None,
        "7",
    ),
    "columns without a value": (
        {"prompt": None, "tools": None, "messages": [user("q"), says("a")]},
        "user q",
        "assistant a",
        "",
    ),
    "a call as the reply": (
        {"messages": [user("q"), says(None, tool_calls=[CALL])]},
        "user q",
        f"assistant {ASKING}",
        "",
    ),
    "ShareGPT": ({"conversations": [human("q"), gpt("a")]}, "user q", "assistant a", ""),
    "ShareGPT, gpt first": (
        {"conversations": [gpt("hi"), human("q"), gpt("a")]},
        "assistant hi / user q",
        "assistant a",
        "",
    ),
    "ShareGPT, tools": (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                human("q"),
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                gpt("a"),
            ]
        },
        f"system s / user q / assistant {ASKING} / tool 2 call00000",
        "assistant a",
        "",
    ),
    "conversations, OpenAI's keys": ({"conversations": [user("q"), says("a")]}, "user q", "assistant a", ""),
    "Alpaca": ({"instruction": "i", "input": "x", "output": "a"}, "i\n\nx", "a", ""),
    "Alpaca, no input": ({"instruction": "i", "input": "", "output": "a"}, "i", "a", ""),
    "question, answer": ({"question": "q", "answer": "7"}, "q", "7", "7"),
    "problem, solution": ({"problem": "q", "solution": "so 7"}, "q", "so 7", "so 7"),
    "problem, solution, answer": ({"problem": "q", "solution": "so 7", "answer": "7"}, "q", "so 7", "7"),
    "verl": (
        {"data_source": "d", "prompt": [user("q")], "reward_model": {"style": "rule", "ground_truth": "7"}},
        "user q",
        None,
        "7",
    ),
}


@pytest.mark.parametrize(("row", "prompt", "reply", "answer"), LAYOUTS.values(), ids=LAYOUTS)
def test_row_is_read_by_its_own_keys(tmp_path, row, prompt, reply, answer):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(path) == [(prompt, reply, answer, None)]


LEFT_OUT = [
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "q", "a", "rejected"),
    ({"prompt": [user("q")], "chosen": [says("a")], "rejected": [says("b")]}, "user q", "assistant a", "rejected"),
    ({"prompt": "q", "chosen": [user("q"), says("a")], "rejected": "b"}, "user q", "assistant a", "rejected"),
    ({"chosen": [user("q"), says("a")], "rejected": [user("q"), says("b")]}, "user q", "assistant a", "rejected"),
    ({"messages": [user("q"), says("a"), user("r")]}, "user q", "assistant a", "behind"),
    ({"instruction": "i", "output": "a", "history": [["q", "b"]]}, "i", "a", "`history` is not read"),
    ({"prompt": "q", "completion": "a", "context": "c"}, "q", "a", "`context` is not read"),
    ({"messages": [user("q"), says("a")], "functions": [ADD]}, "user q", "assistant a", "write them as `tools`"),
]


@pytest.mark.parametrize(("row", "prompt", "reply", "what"), LEFT_OUT)
def test_what_is_left_out_of_a_row_is_said(tmp_path, row, prompt, reply, what):
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(row) + "\n") * 2)
    with pytest.warns(UserWarning, match=rf"rows\.jsonl, line 1, .*{what}"):
        assert read(path) == [(prompt, reply, "", None)]


@pytest.mark.parametrize("label", [False, 0, "False", "0"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "a"},
        {"prompt": [user("q")], "completion": [says("a")]},
        {"messages": [user("q"), says("a")]},
        {"instruction": "q", "output": "a"},
    ],
)
def test_reply_that_is_labelled_bad_is_no_demonstration(tmp_path, row, label):
    path = tmp_path / "rows.jsonl"
    rows = [row | {"label": True}, row | {"label": label}, row | {"label": label}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match=r"line 2, the first of 2 rows: .*`label` is false"):
        assert [task[1] for task in read(path)] in (["a"], ["assistant a"])


@pytest.mark.parametrize(
    ("row", "args"),
    [
        ({"question": "q", "answer": 7, "label": 0}, {}),
        ({"prompt": "q", "label": False}, {}),
        ({"prompt": "q", "completion": "a", "label": 0}, {"answer_key": "label"}),
    ],
)
def test_label_of_something_else_leaves_nothing_out(tmp_path, row, args):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert len(read(path, **args)) == 1


SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("row", "args", "system", "note"),
    [
        ({"instruction": "i", "output": "a", "system": "S"}, {}, "S", None),
        ({"question": "q", "answer": "a", "system_prompt": "S"}, {}, "S", None),
        ({"conversations": [human("q"), gpt("a")], "system": "S"}, {}, "S", None),
        ({"prompt": "q", "system": ""}, {}, None, None),
        ({"prompt": "q", "system": None, "system_prompt": "S"}, {"system": "S"}, "S", None),
        ({"prompt": "q", "system": "S"}, {"system": "T"}, "T", "`system` is left out"),
        ({"messages": [SYSTEM, user("q"), says("a")], "system": "S"}, {}, None, None),
        ({"messages": [SYSTEM, user("q"), says("a")], "system": "T"}, {}, None, "`system` is left out"),
    ],
)
def test_system_message_beside_the_prompt_is_read(tmp_path, row, args, system, note):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    settings = {"path": str(path), "eval_fraction": 0, **args}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        [task] = take_tasks(load_taskset("prl.envs.tasksets.jsonl", settings, "envs.e.args"), 100, "envs.e.args")
    assert task.data.system_prompt == system
    assert [note in str(warning.message) for warning in caught] == ([] if note is None else [True])


def test_rows_that_differ_in_their_system_message_are_two(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "q", "system": system}) + "\n" for system in "ST"))
    assert len(read(path)) == 2


@pytest.mark.parametrize("tools", [TOOLS, [ADD], json.dumps(TOOLS), json.dumps([ADD])])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("q"), says("a")]},
        {"prompt": "q", "completion": "a"},
        {"conversations": [human("q"), gpt("a")]},
        {"instruction": "q", "output": "a"},
        {"question": "q", "answer": "a"},
    ],
)
def test_tools_may_stand_beside_any_layout(tmp_path, row, tools):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"tools": tools}) + "\n")
    assert [task[3] for task in read(path)] == [TOOLS]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_none(tmp_path, tools):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "answer": "7", "tools": tools}) + "\n")
    assert read(path) == [("q", None, "7", None)]


def test_rows_of_one_file_may_differ(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q", "completion": "a"}, {"messages": [user("long"), says("b")]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(task[0], task[1]) for task in read(path)] == [("q", "a"), ("user long", "assistant b")]


def test_keys_of_other_rows_in_a_parquet_file_are_no_part_of_a_message_or_a_tool(tmp_path):
    other = {"name": "now", "description": "Tells.", "parameters": {"type": "object", "required": ["zone"]}}
    rows = [
        {"messages": [user("q"), says("", tool_calls=[CALL])], "tools": [ADD | {"parameters": {"type": "object"}}]},
        {"messages": [user("longer"), says("b")], "tools": [other]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (_, call, _, [add]), (_, reply, _, _) = read(tmp_path / "rows.parquet")
    assert (call, reply) == (f"assistant {ASKING}", "assistant b")
    assert add["function"] == ADD | {"parameters": {"type": "object"}}


TALK = [user("q"), says("a"), user("r"), says("b"), user("s")]


@pytest.mark.parametrize(
    ("row", "args"),
    [
        ({"messages": TALK}, {}),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, {}),
        ({"talk": TALK}, {"prompt_key": "talk", "demonstration_key": "talk"}),
    ],
)
def test_every_turn_of_a_conversation_may_be_a_task(tmp_path, row, args):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    expected = [("user q", "assistant a"), ("user q / assistant a / user r", "assistant b")]
    with pytest.warns(UserWarning, match="left out"):
        assert [task[:2] for task in read(path, train_turns="all", **args)] == expected


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize(
    ("marked", "answer", "turns", "expected"),
    [
        (1, {}, "all", [("user q / assistant a / user r", "assistant b", "")]),
        (1, {}, "last", [("user q / assistant a / user r", "assistant b", "")]),
        (3, {}, "all", [("user q", "assistant a", "")]),
        (3, {"answer": "7"}, "all", [("user q", "assistant a", ""), ("user q / assistant a / user r", None, "7")]),
        (3, {"answer": "7"}, "last", [("user q / assistant a / user r", None, "7")]),
    ],
)
def test_turn_that_is_not_to_be_trained_is_not_imitated(tmp_path, mark, marked, answer, turns, expected):
    path = tmp_path / "rows.jsonl"
    talk = [message | mark if place == marked else message for place, message in enumerate(TALK[:4])]
    path.write_text(json.dumps({"messages": talk, **answer}) + "\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [task[:3] for task in read(path, train_turns=turns)] == expected
    assert ["not imitated" in str(warning.message) for warning in caught] == [True] * ((marked, turns) != (1, "last"))


def test_an_answer_grades_the_last_turn_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TALK[:4], "answer": "b"}) + "\n")
    assert [task[2] for task in read(path, train_turns="all")] == ["", "b"]


def test_turns_of_a_conversation_are_in_one_split(tmp_path):
    path = tmp_path / "rows.jsonl"
    talks = [[user(f"q{n}"), says("a"), user("r"), says("b")] for n in range(20)]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    args = {"train_turns": "all", "eval_fraction": 0.3, "grader": f"{__name__}.always"}
    train, held_out = read(path, **args), read(path, split="eval", **args)
    assert (len(train), len(held_out)) == (28, 12)
    assert not {task[0].split(" ")[1] for task in train} & {task[0].split(" ")[1] for task in held_out}


def always(reply, answer):
    """Take any reply; rows have no answer."""
    return 1.0


def test_explicit_keys_go_before_the_layout(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "answer": "7", "completion": "a", "hard": "p", "how": "h"}) + "\n")
    assert read(path, prompt_key="hard") == [("p", None, "7", None)]
    assert read(path, demonstration_key="how") == [("q", "h", "7", None)]
    assert read(path, answer_key="how") == [("q", "a", "h", None)]
