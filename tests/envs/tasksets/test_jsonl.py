"""env=jsonl: rows of every kind of file as tasks, its graders by hand, its two splits, and what it says of bad rows."""

import csv
import json
import math
import warnings
from decimal import Decimal

import huggingface_hub.constants
import numpy
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from verifiers.v1.dialects.chat import message_to_wire

from prl.base.errors import ConfigError
from prl.config.schema import EnvConfig
from prl.envs.environment import Environment, load_taskset, take_tasks
from prl.envs.tasksets.files import rows_of

PARTS = [{"type": "text", "text": "How "}, {"type": "text", "text": "warm?"}]
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "how": f"{n}+1 = {n + 1}"} for n in range(30)]


def one_of(reply, answer, sep="|", bonus=0.0):
    return (reply in answer.split(sep)) + bonus


def tasks(path, **args):
    return take_tasks(
        load_taskset("prl.envs.tasksets.jsonl", {"path": str(path), **args}, "envs.e.args"), 1000, "envs.e.args"
    )


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


WRITE = {
    ".jsonl": jsonl,
    ".json": lambda path, rows: path.write_text(json.dumps(rows)),
    ".csv": as_csv,
    ".parquet": lambda path, rows: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path),
}


@pytest.fixture
def path(tmp_path):
    return jsonl(tmp_path / "rows.jsonl", ROWS)


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", WRITE)
def test_each_row_of_a_file_is_a_task(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    WRITE[suffix](path, ROWS)
    found = tasks(path, eval_fraction=0, demonstration_key="how", system="Be brief.")
    given = sorted((t.data.prompt, t.data.answer, t.data.demonstration) for t in found)
    assert given == sorted(tuple(row.values()) for row in ROWS)
    assert {task.data.system_prompt for task in found} == {"Be brief."}
    assert len({task.key for task in found}) == 30
    assert [task.key for task in tasks(path, eval_fraction=0, demonstration_key="how", seed=1)] != [
        task.key for task in found
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_byte_order_mark_is_skipped(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    WRITE[suffix](path, ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(tasks(path, eval_fraction=0)) == 30


def task_of(tmp_path, row, **args):
    """The task that is made of one row."""
    [task] = tasks(jsonl(tmp_path / "a.jsonl", [row]), **args)
    return task


def test_keys_messages_and_numbers_of_rows_are_read(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": PARTS}]
    row = {"chat": messages, "reward_model": {"style": "rule", "truth": 2.5}, "prompt": "no"}
    task = task_of(tmp_path, row, prompt_key="chat", answer_key="reward_model.truth")
    assert [(m.role, m.content) for m in task.data.prompt] == [("system", "s"), ("user", "How warm?")]
    assert (task.data.answer, task.data.demonstration) == ("2.5", None)


def test_a_demonstration_may_be_messages(tmp_path):
    row = {"prompt": "q", "answer": "7", "how": [{"role": "assistant", "content": PARTS}]}
    task = task_of(tmp_path, row, demonstration_key="how")
    assert task.data.demonstration == [{"role": "assistant", "content": "How warm?"}]


def test_held_out_share_depends_on_prompts_alone(tmp_path):
    rows = [*ROWS, ROWS[3], ROWS[4] | {"answer": "another"}]
    path, turned = jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", rows[::-1])
    train, held_out = tasks(path, eval_fraction=0.2), tasks(path, eval_fraction=0.2, split="eval")
    assert len(train) + len(held_out) == 31 and len({task.data.prompt for task in held_out}) == 6
    assert not {task.data.prompt for task in train} & {task.data.prompt for task in held_out}
    assert {task.key for task in tasks(turned, eval_fraction=0.2, split="eval")} == {task.key for task in held_out}
    assert len(tasks(path, num_tasks=4)) == 4
    assert len(tasks(path, eval_fraction=0.01, split="eval")) == 1, "a small file has one too"


def test_files_of_a_split_are_named_by_a_pattern(tmp_path):
    for number, name in enumerate(("train-0.jsonl", "train-1.jsonl", "test-0.jsonl")):
        jsonl(tmp_path / name, ROWS[3 * number : 3 * number + 3])
    found = tasks(tmp_path / "train-*.jsonl", eval_fraction=0)
    assert {task.data.prompt for task in found} == {row["prompt"] for row in ROWS[:6]}
    with pytest.raises(ConfigError, match=r"<folder>/train-\*\.parquet"):
        tasks(tmp_path)


def test_held_out_rows_of_another_file_never_train(tmp_path, path):
    other = jsonl(tmp_path / "eval.jsonl", [*ROWS[:2], {"prompt": "new", "answer": "1"}])
    config = EnvConfig(
        taskset="prl.envs.tasksets.jsonl",
        args={"path": str(path), "eval_path": str(other)},
        eval_args={"split": "eval"},
    )
    environment = Environment("e", config, eval_tasks=100)
    assert {task.data.prompt for task in environment.eval_tasks} == {"0+1=", "1+1=", "new"}
    assert len(environment.tasks) == 28


def test_data_set_in_the_cache_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    stored = tmp_path / "datasets--me--sums"
    for name, rows in (("a/train-0.jsonl", ROWS[:9]), ("a/train-1.jsonl", ROWS[9:20]), ("b/test/0.jsonl", ROWS[20:])):
        file = stored / "snapshots" / "abc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        jsonl(file, rows)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    assert len(tasks("hub:me/sums:train", eval_path="hub:me/sums/b:test")) == 20
    assert len(tasks("hub:me/sums/a:train", eval_fraction=0.5, split="eval")) == 10
    jsonl(stored / "snapshots" / "abc" / "b" / "train.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"several folders hold a train split \(a, b\): name one, owner/name/folder"):
        tasks("hub:me/sums:train")
    jsonl(stored / "snapshots" / "abc" / "b" / "train_sft-00000-of-00002.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"no split 'train_gen'; its splits: test, train, train_sft"):
        tasks("hub:me/sums:train_gen")
    with pytest.raises(ConfigError, match=r"me/other is not in the hub's cache .* set path to a \.jsonl"):
        tasks("hub:me/other:train")
    with pytest.raises(ConfigError, match=r"'hub:sums:train': write hub:owner/name:split"):
        tasks("hub:sums:train")


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """`cached(names, tree)`: the data set me/sums in the hub's cache, with these files; `tree` is the hub's list."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")

    def make(names, tree=()):
        stored, commit = tmp_path / "datasets--me--sums", "a" * 40
        for number, name in enumerate(names):
            file = stored / "snapshots" / commit / name
            file.parent.mkdir(parents=True, exist_ok=True)
            jsonl(file, [ROWS[number] | {"answer": name}])
        (stored / "refs").mkdir()
        (stored / "refs" / "main").write_text(commit)
        if tree:
            entries = {name: TreeCacheEntry(1, "b", None, None, None) for name in tree}
            write_tree_cache(str(stored), commit, entries)
        return stored / "snapshots" / commit

    return make


@pytest.mark.parametrize(
    ("split", "own", "others"),
    [
        ("dev", ["dev.jsonl"], ["devtest.jsonl"]),
        ("test", ["test-00000-of-00001.jsonl"], ["testmini-00000-of-00001.jsonl", "test_hard.jsonl"]),
        ("train", ["train-00000-of-00002-ab12.jsonl", "train-00001-of-00002-cd34.jsonl"], ["train_sft.jsonl"]),
        ("train", ["train.jsonl"], ["train_2.jsonl", "train-en.jsonl"]),
        ("train_2", ["train_2.jsonl"], ["train.jsonl", "train_3.jsonl"]),
        ("train", ["part/train/0000.jsonl", "part/train/0001.jsonl"], ["part/train_gen/0000.jsonl"]),
        ("validation", ["validation.0.jsonl", "validation.1.jsonl"], ["validation_mismatched.0.jsonl"]),
        ("train", ["train/a.jsonl"], ["train/README.json", "train/state.json", "train/dataset_info.json"]),
    ],
)
def test_split_is_its_whole_name(cached, split, own, others):
    cached([*own, *others])
    assert {task.data.answer for task in tasks(f"hub:me/sums:{split}", eval_fraction=0)} == set(own)


@pytest.mark.parametrize("names", [["train.csv", "train.json"], ["train/0.json", "train/0.b.json", "train/0.parquet"]])
def test_file_in_two_formats_is_refused(cached, names):
    cached(names)
    with pytest.raises(ConfigError, match=rf"{names[0]} and {names[-1].rpartition('/')[2]} may be the same rows twice"):
        tasks("hub:me/sums:train")


@pytest.mark.parametrize(
    ("names", "tree"),
    [
        (["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"], []),
        (["train-00001-of-00002-ab12.jsonl"], []),
        (["train/00000-of-00002.jsonl"], []),
        (["train-1-of-2.jsonl"], []),
        (["train_0_of_2.jsonl"], []),
        (["train.0.jsonl"], ["train.0.jsonl", "train.1.jsonl"]),
    ],
)
def test_split_of_which_files_are_missing_is_refused_or_warned_of(cached, names, tree):
    folder = cached(names, tree)
    with pytest.raises(ConfigError, match="me/sums is not in the hub's cache"):
        tasks("hub:me/sums:train", eval_fraction=0)
    if not tree:  # which is the hub's
        for path in (folder / names[0], (folder / names[0]).parent / "*.jsonl"):
            with pytest.warns(UserWarning, match=rf"{len(names)} of \d files are there|1 of \d files are there"):
                assert tasks(path, eval_fraction=0)


def test_whole_split_is_taken_whatever_else_is_missing(cached):
    folder = cached(
        ["train-1-of-2.jsonl", "train-2-of-2.jsonl"], ["train-1-of-2.jsonl", "train-2-of-2.jsonl", "dev.csv"]
    )
    assert len(tasks("hub:me/sums:train", eval_fraction=0)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tasks(folder / "train-*", eval_fraction=0)) == 2


NESTED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
FLAT = {"id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}


def asking(call):
    return [
        {"role": "user", "content": "How warm is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]


@pytest.mark.parametrize(
    "call",
    [
        NESTED,
        NESTED | {"function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        FLAT,
        FLAT | {"arguments": {"city": "Oslo"}},
    ],
)
def test_tool_calls_of_either_format_reach_the_template(tmp_path, renderer, tokenizer, call):
    (task,) = tasks(jsonl(tmp_path / "a.jsonl", [{"prompt": asking(call), "answer": "7"}]))
    sent = renderer.render([message_to_wire(message) for message in task.data.prompt], add_generation_prompt=True)
    assert sent.token_ids == renderer.render(asking(NESTED), add_generation_prompt=True).token_ids
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}' in tokenizer.decode(sent.token_ids)


def test_tool_call_may_lack_arguments(tmp_path):
    call = {"id": "c1", "function": {"name": "now"}}
    assert task_of(tmp_path, {"prompt": asking(call), "answer": "7"}).data.prompt[1].tool_calls[0].arguments == "{}"


BAD_MESSAGES = [
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}],
    [{"role": "bob", "content": "x"}],
    [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}],
    [{"role": "tool", "tool_call_id": "c1"}],
    ["hi"],
    asking("weather"),
    asking({"id": "c1", "function": "weather"}),
    asking({"id": "c1", "function": {"arguments": "{}"}}),
    asking({"id": "c1", "function": {"name": "f", "arguments": "{city: Oslo}"}}),
    asking({"function": {"name": "f", "arguments": "{}"}}),
]


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=str)
def test_unreadable_messages_are_refused_with_file_line_and_key(tmp_path, messages):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "fine", "answer": "5"}, {"prompt": messages, "answer": "7"}])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: key 'prompt' is no list of chat messages: \S"):
        tasks(path)


@pytest.mark.parametrize(
    ("kind", "value", "answer"),
    [
        (pyarrow.float32(), 0.1, "0.1"),
        (pyarrow.float32(), 2 / 3, "0.6666667"),
        (pyarrow.float64(), 72.0, "72"),
        (pyarrow.float64(), 0.1 + 0.2, "0.30000000000000004"),
        (pyarrow.decimal128(5, 2), Decimal("1.50"), "1.50"),
        (pyarrow.int64(), 2**53 + 1, "9007199254740993"),
        (pyarrow.float64(), math.nan, ""),
    ],
)
def test_parquet_numbers_are_written_as_people_write_them(tmp_path, kind, value, answer):
    table = pyarrow.table({"prompt": ["p"], "answer": pyarrow.array([value], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (task,) = tasks(tmp_path / "a.parquet")
    assert task.data.answer == answer


@pytest.mark.parametrize(
    ("columns", "names", "says"),
    [
        ([["p"], ["4"], ["5"]], ["prompt", "answer", "answer"], r"a\.parquet: two columns are named 'answer'"),
        ([["p"], [math.inf]], ["prompt", "answer"], r"a\.parquet, row 1: key 'answer' must be .*, got inf"),
    ],
)
def test_unusable_parquet_file_is_refused_in_a_line(tmp_path, columns, names, says):
    pyarrow.parquet.write_table(pyarrow.table(columns, names), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=says) as caught:
        tasks(tmp_path / "a.parquet")
    assert "\n" not in str(caught.value)


HALF, SINGLE = pyarrow.float16(), pyarrow.float32()


@pytest.mark.parametrize(
    ("kind", "value", "row"),
    [
        (HALF, 0.1, "0.1"),
        (pyarrow.struct([("a", pyarrow.struct([("b", SINGLE)]))]), {"a": {"b": 0.1}}, {"a": {"b": "0.1"}}),
        (pyarrow.struct([("a", HALF), ("b", pyarrow.int8())]), {"a": 0.2, "b": None}, {"a": "0.2"}),
        (pyarrow.list_(pyarrow.struct([("a", SINGLE)])), [{"a": 0.3}, {"a": None}], [{"a": "0.3"}, {}]),
        (pyarrow.large_list(HALF), [0.7, None], ["0.7", None]),
        (pyarrow.list_(SINGLE, 2), [0.1, 2.0], ["0.1", "2"]),
        (pyarrow.map_(pyarrow.string(), SINGLE), {"k": 0.1}, {"k": "0.1"}),
        (pyarrow.struct([("a", pyarrow.decimal128(5, 2))]), {"a": Decimal("1.50")}, {"a": "1.50"}),
    ],
    ids=str,
)
def test_numbers_below_the_top_of_a_parquet_file_are_what_was_written(tmp_path, kind, value, row):
    values = [list(value.items()) if pyarrow.types.is_map(kind) else numpy.float16(value) if kind == HALF else value]
    if kind == pyarrow.large_list(HALF):
        values = [[each if each is None else numpy.float16(each) for each in value]]
    pyarrow.parquet.write_table(pyarrow.table({"x": pyarrow.array(values, kind)}), tmp_path / "a.parquet")
    assert [read for _, read in rows_of(tmp_path / "a.parquet")] == [{"x": row}]


def test_names_may_have_capitals_and_blanks(tmp_path):
    (tmp_path / "a.CSV").write_text(f"prompt, answer\n{'word ' * 100_000},5\n")
    [task] = tasks(tmp_path / "a.CSV")
    assert (task.data.prompt, task.data.answer) == ("word " * 100_000, "5")


def test_chat_in_a_text_column_is_a_chat(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    as_csv(
        tmp_path / "a.csv", [{"prompt": json.dumps(messages), "answer": "5"}, {"prompt": '[{"role": 3', "answer": 6}]
    )
    chat, text = sorted(tasks(tmp_path / "a.csv", eval_fraction=0), key=lambda task: task.data.answer)
    assert [(each.role, each.content) for each in chat.data.prompt] == [("system", "S"), ("user", "U")]
    assert text.data.prompt == '[{"role": 3'


# --- graders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(
    ("written", "reply", "reward"),
    [
        ("0.00001", "0.00001", 1.0),
        ("1e-05", "0.00001", 1.0),
        ("0.00001", "5", 0.0),
        ("1e22", "10000000000000000000000", 1.0),
        ("0.1", "0.1", 1.0),
        ("3.14159265358979323846", "3.14159265358979323846", 1.0),
        ("3.14159265358979323846", "3.14159265358979", 0.0),
        ("12345678901234567890", "12,345,678,901,234,567,890", 1.0),
    ],
)
def test_number_is_graded_as_written_in_the_file(tmp_path, suffix, written, reply, reward):
    row = f'{{"prompt": "?", "answer": {written}}}'
    path = tmp_path / f"rows{suffix}"
    path.write_text(row if suffix == ".jsonl" else f"[{row}]")
    (task,) = tasks(path, grader="numeric")
    assert (task.data.answer, task.grade(reply)) == (written, reward)


NO_ANSWERS = {
    "exact": ["  ", "\u00a0\u3000", " . "],
    "numeric": ["17:30", "(2, 7)", "2x + 1", "3 or 4", "1/0", "five", "2^{10}", "\\sqrt{2}", "±5", "9" * 2000, "#### "],
    "math_verify": ["$$", "\\boxed{}", "  ", "\\frac{1}{"],
    f"{__name__}.one_of": ["  "],
}


@pytest.mark.parametrize(("grader", "answer"), [(grader, each) for grader in NO_ANSWERS for each in NO_ANSWERS[grader]])
def test_ungradable_answer_is_refused_with_file_line_and_key(tmp_path, grader, answer):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "fine", "answer": "5"}, {"prompt": "p", "answer": answer}])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: key 'answer' must "):
        tasks(path, grader=grader)


@pytest.mark.parametrize("answer", ["+", "*", "[]", "...!", "U.S.", "<br>"])
def test_an_answer_of_signs_is_one(tmp_path, answer):
    (task,) = tasks(jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "answer": answer}]))
    assert (task.grade(answer), task.grade("")) == (1.0, 0.0)


def test_a_function_of_the_users_grades(path):
    by_name = tasks(path, grader=f"{__name__}.one_of")[0]
    assert (by_name.grade(by_name.data.answer), by_name.grade("x")) == (1.0, 0.0)
    with_arguments = tasks(path, grader={"_target_": f"{__name__}.one_of", "bonus": 0.5})[0]
    assert with_arguments.grade("x") == 0.5


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "args", "says"),
    [
        ("none.jsonl", None, {}, "none.jsonl' is not a file"),
        ("a.jsonl", "", {}, "a.jsonl has no rows"),
        ("a.txt", "x", {}, r"a\.txt: read are \.jsonl, \.json, \.csv, \.parquet"),
        ("a.jsonl", '{"prompt": "p", "answer": "a"}\n\n{"prompt"', {}, "a.jsonl, line 3 is not JSON"),
        ("a.jsonl", '"p"', {}, "a.jsonl, line 1: a row is a mapping"),
        (
            "a.jsonl",
            '\n{"prompt": "p", "gold": 1}',
            {"answer_key": "answer"},
            r"line 2: there is no 'answer' \(its keys: 'prompt', 'gold'\)",
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null}]}',
            {},
            "line 1: the assistant's message to imitate is empty",
        ),
        (
            "a.jsonl",
            '{"prompt": "q", "completion": [{"role": "assistant", "content": ""}]}',
            {},
            "line 1: the assistant's message to imitate is empty",
        ),
        (
            "a.csv",
            "prompt,answer\n\"[{'role': 'user', 'content': 'Q'}]\",5\n",
            {},
            r"line 2: key 'prompt': messages as text must be JSON \(json\.dumps",
        ),
        (
            "a.csv",
            "messages\n\"[{'content': 'Q', 'role': 'user'}]\"\n",
            {},
            "line 2: key 'messages': messages as text must be JSON",
        ),
        pytest.param(
            *("a.jsonl", '{"prompt": "p", "completion": "a", "label": false}', {}, "has no rows that are not left out"),
            marks=pytest.mark.filterwarnings("ignore:.*`label` is false"),
        ),
        ("a.jsonl", '{"prompt": "p", "system": 3}', {}, "line 1: key 'system' must be str and not empty, got 3"),
        ("a.jsonl", '{"text": "p"}', {}, "line 1: no layout of rows fits its keys .'text'.: name .* prompt_key"),
        ("a.jsonl", '{"messages": "p"}', {}, "line 1: key 'messages' must be list and not empty, got 'p'"),
        ("a.jsonl", '{"messages": [{"role": "bob", "content": ""}]}', {}, "line 1: key 'messages' is no list of chat"),
        ("a.jsonl", '{"prompt": "p", "completion": [3]}', {}, "line 1: key 'completion' is no list of chat messages"),
        ("a.jsonl", '{"chosen": "Human: q", "rejected": "r"}', {}, "line 1: key 'chosen' must be list"),
        ("a.jsonl", '{"prompt": "p", "tools": ["add"]}', {}, "line 1: key 'tools' is no list of tools in OpenAI's"),
        ("a.jsonl", '{"prompt": "p", "tools": [{"function": {}}]}', {}, "line 1: key 'tools' is no list of tools"),
        ("a.jsonl", '{"problem": "p", "solution": "."}', {}, "line 1: key 'solution' must not be empty"),
        (
            "a.jsonl",
            '{"prompt": 3, "answer": "a"}',
            {},
            "line 1: key 'prompt' must be str or list and not empty, got 3",
        ),
        ("a.jsonl", '{"prompt": "", "answer": "a"}', {}, "line 1: key 'prompt' must be"),
        ("a.jsonl", '{"prompt": "p", "answer": "a"}', {"demonstration_key": "d"}, "line 1: there is no 'd'"),
        ("a.jsonl", '{"prompt": "p", "answer": "a"}', {"grader": "numeric"}, "key 'answer' must be a single number"),
        ("a.jsonl", '{"prompt": "p", "answer": "a"}', {"split": "eval"}, "no prompt is held out: set eval_path"),
        ("a.json", '{"prompt": "p"}', {}, "a.json must hold a list of rows"),
        ("a.csv", "prompt,answer\np,a\nq\n", {"answer_key": "answer"}, "a.csv, line 3: key 'answer' has no value"),
        ("a.csv", "prompt,answer, answer\np,a,b\n", {}, "a.csv, line 1: two columns are named 'answer'"),
        ("a.csv", "prompt,answer\np,a\nq,a,b,c\n", {}, "a.csv, line 3: 4 values for 2 columns"),
        ("a.jsonl", '{"prompt": "p", "answer": null}', {"answer_key": "answer"}, "line 1: key 'answer' has no value"),
        ("a.jsonl", '{"prompt": "p", "answer": NaN}', {}, "line 1: key 'answer' must be .*, got nan"),
        ("a.jsonl", r'{"prompt": "a\ud800", "answer": "1"}', {}, r"line 1: key 'prompt' has a character"),
        ("a.jsonl", r'{"prompt": [{"content": "\udc00"}], "answer": "1"}', {}, r"line 1: key 'prompt' has a character"),
        ("a.csv", 'prompt,answer\np,a\n"Q,4\nR,5\n', {}, r"a\.csv, line 3, is not CSV: .* a quote that is not closed"),
        ("a.csv", 'prompt,answer\n"Q,4\n"R",5\n', {}, r"a\.csv, line 2, is not CSV"),
        ("a.csv", b"prompt,answer\n\xff,a\n", {}, "a.csv is not CSV in UTF-8"),
        ("a.parquet", "PAR1", {}, "[Pp]arquet"),
    ],
)
def test_unusable_file_is_refused_with_place_and_key(tmp_path, name, text, args, says):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says) as caught:
        tasks(tmp_path / name, **args)
    assert str(caught.value).startswith("envs.e.args: ")


@pytest.mark.parametrize(
    ("grader", "says"),
    [
        ("precise", "'precise' is neither exact nor numeric nor math_verify nor the dotted path of a function"),
        ("my.no_such", "No module named 'my'"),
        ("os.system", "os.system"),
        (f"{__name__}.tasks", "cannot be called"),
        ({"_target_": f"{__name__}.one_of", "bonuss": 1}, "cannot be called"),
        ({"bonus": 1}, "has no _target_"),
    ],
)
def test_a_grader_that_cannot_grade_is_refused(path, grader, says):
    with pytest.raises(ConfigError, match=rf"^envs\.e\.args\.grader.*{says}"):
        tasks(path, grader=grader)
