"""Pictures in rows of `env=jsonl`: from every column, in their places, each refused by file and row."""

import base64
import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from prl.base.errors import ConfigError
from prl.config.schema import EnvConfig
from prl.envs.environment import Environment, load_taskset, take_tasks
from prl.rollouts.pictures import PictureStore, digest_of

COLOURS = ("red", "blue", "green")
PICTURES = {colour: Image.new("RGB", (6, 4), colour) for colour in COLOURS}
NAMES = {"picture:" + digest_of(image): colour for colour, image in PICTURES.items()}


def content_of(image):
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "a folder"
    made.mkdir()
    for colour, image in PICTURES.items():
        image.save(made / f"{colour}.png")
    return made


@pytest.fixture
def load(folder):
    """`load(rows)`: the tasks of a file of these rows."""

    def make(rows, store=True, **args):
        path = folder / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        settings = {"path": str(path), "eval_fraction": 0.0, **args}
        taskset = load_taskset("prl.envs.tasksets.jsonl", settings, "envs.e.args")
        kept = PictureStore(folder / "pictures") if store else None
        return take_tasks(taskset, 100, "envs.e.args", pictures=kept)

    return make


def shown(messages):
    """The messages as (role, content), a picture by its colour in brackets."""
    return [(m.role, m.content if isinstance(m.content, str) else "".join(map(said, m.content))) for m in messages]


def said(part):
    return part.text if part.type == "text" else f"[{NAMES[part.image_url.url]}]"


def user(*parts):
    return {"role": "user", "content": list(parts) if len(parts) != 1 else parts[0]}


TEXT, SLOT = {"type": "text", "text": "see"}, {"type": "image"}
URL = "data:image/png;base64," + base64.b64encode(content_of(PICTURES["red"])).decode()
ROWS = {
    "one, in front": ({"prompt": "Which?", "images": "red.png"}, "[red]Which?"),
    "the key of LLaVA": ({"prompt": "Which?", "image": "red.png"}, "[red]Which?"),
    "two, in front": ({"prompt": "Which?", "images": ["red.png", "blue.png"]}, "[red][blue]Which?"),
    "marks": ({"prompt": "A <image>\nor <image>?", "images": ["red.png", "blue.png"]}, "A [red]\nor [blue]?"),
    "verl": ({"prompt": [user("<image>Which?")], "images": [{"path": "red.png"}]}, "[red]Which?"),
    "trl": ({"prompt": [user(SLOT, TEXT, SLOT)], "images": ["blue.png", "red.png"]}, "[blue]see[red]"),
    "openai": ({"prompt": [user(TEXT, {"type": "image_url", "image_url": {"url": URL}})]}, "see[red]"),
    "openai, beside": (
        {"prompt": [user({"type": "image_url", "image_url": {"url": URL}}, TEXT, SLOT)], "images": "blue.png"},
        "[red]see[blue]",
    ),
    "data URL": ({"prompt": "Which?", "images": [URL]}, "[red]Which?"),
    "text that spells a mark": ({"prompt": [user(TEXT, {"type": "text", "text": "<image>"})]}, "see<image>"),
    "none": ({"prompt": "Which <image>?", "images": []}, "Which <image>?"),
    "a gap": ({"prompt": "<image>?", "images": [None, "red.png", None]}, "[red]?"),
    "a numbered part": ({"prompt": [user({"type": "image", "index": 1}, TEXT)], "images": ["red.png"]}, "[red]see"),
    "an image of a container": ({"prompt": "hi", "image": "docker.io/foo/bar:latest", "videos": []}, "hi"),
    "a number": ({"prompt": "hi", "image": 5}, "hi"),
}


@pytest.mark.parametrize("name", ROWS)
def test_pictures_stand_where_the_row_puts_them(load, name):
    row, content = ROWS[name]
    [task] = load([row | {"answer": "x"}])
    [(role, found)] = shown(task.data.prompt) if isinstance(task.data.prompt, list) else [("user", task.data.prompt)]
    assert (role, found) == ("user", content)
    assert "base64" not in task.data.model_dump_json()


def test_turns_of_a_conversation_keep_their_pictures(load):
    turns = [user("<image>First?"), {"role": "assistant", "content": "red <image>"}, user("<image>Then?")]
    row = {"messages": [*turns, {"role": "assistant", "content": "blue"}], "images": ["red.png", "blue.png"]}
    tasks = {str(t.data.demonstration[0]["content"]): t for t in load([row], train_turns="all")}
    assert shown(tasks["red <image>"].data.prompt) == [("user", "[red]First?")]
    assert shown(tasks["blue"].data.prompt) == [
        ("user", "[red]First?"),
        ("assistant", "red <image>"),
        ("user", "[blue]Then?"),
    ]
    [last] = load([row])
    assert shown(last.data.prompt) == shown(tasks["blue"].data.prompt)


def test_a_system_prompt_may_speak_of_marks(load):
    row = {"prompt": [{"role": "system", "content": "Use <image> tags"}, user("<image>?")], "images": ["red.png"]}
    [task] = load([row | {"answer": "x"}])
    assert shown(task.data.prompt) == [("system", "Use <image> tags"), ("user", "[red]?")]


def test_a_demonstration_has_replies_alone(load):
    replies = [user(SLOT, TEXT), {"role": "assistant", "content": "red"}]
    row = {"prompt": "Which?", "shown": replies, "images": ["red.png"], "answer": "red"}
    row["prompt"] = "Which?"
    [task] = load([row], prompt_key="prompt", demonstration_key="shown")
    assert task.data.demonstration == [{"role": "assistant", "content": "red"}]


def test_parquet_has_pictures_as_bytes(folder):
    kind = pyarrow.list_(pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    rows = [[{"bytes": content_of(PICTURES[colour]), "path": None}] for colour in ("red", "blue")]
    table = pyarrow.table({"question": ["a", "b"], "answer": ["1", "2"], "images": pyarrow.array(rows, kind)})
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    args = {"path": str(folder / "a.parquet"), "eval_fraction": 0.0}
    taskset = load_taskset("prl.envs.tasksets.jsonl", args, "envs.e.args")
    tasks = take_tasks(taskset, 9, "envs.e.args", pictures=PictureStore(folder / "pictures"))
    assert sorted(content for task in tasks for _, content in shown(task.data.prompt)) == ["[blue]b", "[red]a"]


def test_csv_has_paths_as_text(folder):
    (folder / "a.csv").write_text('prompt,answer,images\nWhich?,x,"[""red.png"", ""blue.png""]"\nThis?,y,green.png\n')
    args = {"path": str(folder / "a.csv"), "eval_fraction": 0.0}
    taskset = load_taskset("prl.envs.tasksets.jsonl", args, "envs.e.args")
    tasks = take_tasks(taskset, 9, "envs.e.args", pictures=PictureStore(folder / "pictures"))
    found = sorted(content for task in tasks for _, content in shown(task.data.prompt))
    assert found == ["[green]This?", "[red][blue]Which?"]


def test_paths_begin_at_the_image_folder(load, folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    PICTURES["green"].save(tmp_path / "elsewhere" / "red.png")
    rows = [{"prompt": "Which?", "answer": "x", "images": "red.png"}]
    [task] = load(rows, image_folder=str(tmp_path / "elsewhere"))
    assert shown(task.data.prompt) == [("user", "[green]Which?")]


BAD = {
    "too few marks": ({"prompt": "<image>?", "images": ["red.png", "blue.png"]}, "1 places for pictures .* 2 pictures"),
    "too few pictures": (
        {"prompt": "<image> or <image>?", "images": ["red.png"]},
        "2 places for pictures .* 1 pictures",
    ),
    "a part without one": ({"prompt": [user(SLOT, TEXT)]}, "1 places for pictures .* 0 pictures"),
    "nobody to show it to": (
        {"prompt": [{"role": "system", "content": "hi"}], "images": ["red.png"]},
        "no message of the user's",
    ),
    "no such file": ({"prompt": "?", "images": ["black.png"]}, r"there is no picture black\.png .*args\.image_folder"),
    "outside": ({"prompt": "?", "images": ["../x.png"]}, r"outside of .*args\.image_folder"),
    "no picture": ({"prompt": "?", "images": ["rows.jsonl"]}, "no picture that can be read"),
    "too large": ({"prompt": "?", "images": ["large.png"]}, r"above model\.max_pixels=16777216"),
    "on the web": ({"prompt": "?", "images": ["https://example.org/a.png"]}, r"args\.fetch_images=true"),
    "raw base64": ({"prompt": "?", "images": [URL[22:] * 9]}, "is no path of a picture: write base64 as data:"),
    "a number": ({"prompt": "?", "images": [7]}, "'7' is no picture"),
    "two columns": ({"prompt": "?", "images": ["red.png"], "image": "blue.png"}, "image and images hold pictures"),
    "a video": ({"prompt": "<video>?", "videos": ["a.mp4"]}, "prl shows a model no videos"),
    "an assistant's": (
        {"prompt": [user("a"), {"role": "assistant", "content": [SLOT]}, user("b")], "images": ["red.png"]},
        "key 'prompt' is no list of chat messages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_refused_by_file_and_row(load, folder, name):
    row, why = BAD[name]
    Image.new("1", (5000, 5000)).save(folder / "large.png")
    with pytest.raises(ConfigError, match=rf"(?s)rows\.jsonl, line 2: .*{why}"):
        load([{"prompt": "fine", "answer": "x"}, row | {"answer": "x"}])


def test_fetching_is_an_option(load, monkeypatch):
    monkeypatch.setattr(
        "urllib.request.OpenerDirector.open", lambda _, url, timeout: io.BytesIO(content_of(PICTURES["blue"]))
    )
    rows = [{"prompt": "Which?", "answer": "x", "images": "https://example.org/a.png"}]
    assert shown(load(rows, fetch_images=True)[0].data.prompt) == [("user", "[blue]Which?")]


def test_a_model_that_sees_nothing_is_shown_no_picture(load):
    with pytest.raises(ConfigError, match=r"line 1: message 1 is no text: prl shows a model no pictures"):
        load([{"prompt": "Which?", "answer": "x", "images": "red.png"}], store=False)


def test_a_picture_under_two_names_is_in_one_split(folder):
    for number in range(20):
        image = Image.new("RGB", (6, 4), (number, 0, 0))
        image.save(folder / f"{number}.png")
        image.save(folder / f"{number}.bmp")
    names = [f"{number}.{form}" for form in ("png", "bmp") for number in range(20)]
    write(folder / "a.jsonl", names)
    (folder / "held out").mkdir()
    PICTURES["green"].save(folder / "held out" / "3.png")
    (folder / "held out" / "4.png").write_bytes((folder / "5.bmp").read_bytes())
    write(folder / "held out" / "a.jsonl", ["3.png", "4.png"])
    for ways, count in (({"eval_fraction": 0.5}, 20), ({"eval_path": str(folder / "held out" / "a.jsonl")}, 2)):
        of_split = {}
        for split in ("train", "eval"):
            args = {"path": str(folder / "a.jsonl"), "split": split, **ways}
            taskset = load_taskset("prl.envs.tasksets.jsonl", args, "envs.e.args")
            tasks = take_tasks(taskset, 99, "envs.e.args", pictures=PictureStore(folder / "pictures"))
            of_split[split] = [task.data.prompt[0].content[0].image_url.url for task in tasks]
        assert not set(of_split["train"]) & set(of_split["eval"])
        assert len(of_split["eval"]) == count and len(of_split["train"]) == (20 if count == 20 else 38)


def write(path, names):
    path.write_text("".join(json.dumps({"prompt": "Which?", "answer": "x", "images": name}) + "\n" for name in names))


def test_both_splits_have_their_pictures(folder):
    rows = [{"prompt": f"{number}?", "answer": "x", "images": "red.png"} for number in range(8)]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = EnvConfig("prl.envs.tasksets.jsonl", {"path": str(folder / "a.jsonl")}, {"split": "eval"})
    env = Environment("e", config, eval_tasks=5, pictures=PictureStore(folder / "pictures"))
    tasks = [*env.tasks, *env.eval_tasks]
    assert len(env.eval_tasks) == 1 and all(shown(task.data.prompt)[0][1].startswith("[red]") for task in tasks)
