"""shapes: what its pictures show, read from their pixels alone, and what each option changes."""

import base64
import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from prl.envs.tasksets.shapes import ShapesConfig, ShapesTaskset

KINDS = {
    "colour": "Colour of the shape?",
    "count": "How many shapes?",
    "position": "Where is the shape?",
    "digit": "Which digit?",
}
PURE = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "white": (1, 1, 1)}
SIDES = {(0, 1): "left", (2, 1): "right", (1, 0): "top", (1, 2): "bottom", (1, 1): "middle"}
SEGMENTS = {"upper left": (1, 0), "upper right": (1, 2), "bar": (2, 1), "lower left": (3, 0), "lower right": (3, 2)}
"""Row and column of what tells digits apart, in three columns of five blocks."""
LIT = {
    frozenset({"upper left", "upper right", "lower left", "lower right"}): "0",
    frozenset({"upper left", "bar"}): "1",
    frozenset({"upper right", "bar", "lower left"}): "2",
    frozenset({"upper right", "bar", "lower right"}): "3",
    frozenset({"upper left", "upper right", "bar", "lower right"}): "4",
}


def tasks(**options):
    return list(ShapesTaskset(ShapesConfig(**options)))


def pixels(task) -> np.ndarray:
    """The picture of a task, as its prompt has it."""
    picture, _ = task.data.prompt[0].content
    head, data = picture.image_url.url.split(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert (image.mode, image.format) == ("RGB", "PNG")
        return np.asarray(image).astype(int)


def question(task) -> str:
    return task.data.prompt[0].content[1].text


def drawn(image: np.ndarray) -> np.ndarray:
    return image.max(2) > 30


def components(mask: np.ndarray) -> list[set[tuple[int, int]]]:
    """The pixels of each connected thing; corners connect."""
    left, found = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}, []
    while left:
        edge, thing = [left.pop()], set()
        while edge:
            y, x = edge.pop()
            thing.add((y, x))
            around = {(y + down, x + across) for down in (-1, 0, 1) for across in (-1, 0, 1)} & left
            left -= around
            edge += around
        found.append(thing)
    return found


def colour(image: np.ndarray) -> str:
    """The name that is nearest to the picture's most frequent colour beside the background."""
    (value, _), *_ = Counter(map(tuple, image[drawn(image)])).most_common(1)
    return min(PURE, key=lambda name: sum((255 * want - have) ** 2 for want, have in zip(PURE[name], value)))


def position(image: np.ndarray) -> str:
    ys, xs = np.nonzero(drawn(image))
    return SIDES[int(xs.mean() * 3 // image.shape[1]), int(ys.mean() * 3 // image.shape[0])]


def digit(image: np.ndarray) -> str:
    ys, xs = np.nonzero(drawn(image))
    box = drawn(image)[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
    assert box.shape[0] % 5 == 0 and box.shape[0] // 5 == box.shape[1] // 3
    block = box.shape[0] // 5
    blocks = box[block // 2 :: block, block // 2 :: block]
    return LIT[frozenset(name for name, place in SEGMENTS.items() if blocks[place])]


READ = {
    "colour": colour,
    "count": lambda image: str(len(components(drawn(image)))),
    "position": position,
    "digit": digit,
}


@pytest.mark.parametrize("size", [24, 48, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_what_the_pixels_show(kind, size):
    for task in tasks(kinds=[kind], size=size, num_tasks=60):
        image = pixels(task)
        assert question(task) == KINDS[kind] and image.shape == (size, size, 3)
        assert task.data.answer == READ[kind](image)
        assert len(components(drawn(image))) == (int(task.data.answer) if kind == "count" else 1)


def test_each_kind_has_five_answers_of_like_frequency():
    counted = Counter((question(task), task.data.answer) for task in tasks(num_tasks=2000))
    assert len(counted) == 20 and {asked for asked, _ in counted} == set(KINDS.values())
    assert min(counted.values()) > 60 and max(counted.values()) < 140  # 100 each


@pytest.mark.parametrize(
    ("shape", "low", "high"), [("square", 1.0, 1.0), ("circle", 0.7, 0.9), ("triangle", 0.4, 0.65)]
)
def test_a_shape_fills_its_box_as_the_named_one_does(shape, low, high):
    for task in tasks(kinds=["count"], shapes=[shape], size=96, num_tasks=20):
        for thing in components(drawn(pixels(task))):
            ys, xs = zip(*thing, strict=True)
            box = (max(ys) - min(ys) + 1) * (max(xs) - min(xs) + 1)
            assert low <= len(thing) / box <= high


def test_no_picture_of_the_train_split_is_in_the_eval_split():
    """With another question neither: few colours and places make the same pictures for two kinds."""
    options = {"kinds": ["colour", "position", "count"], "shapes": ["square"], "size": 24, "num_tasks": 1500}
    train, held = ({pixels(task).tobytes() for task in tasks(split=split, **options)} for split in ("train", "eval"))
    assert len(train) < 1500  # two questions about one picture are two tasks
    assert held and not train & held


def test_the_seed_decides_what_is_drawn_and_a_task_is_known_by_its_layout():
    first, again, other = ([task.data for task in tasks(num_tasks=50, seed=seed)] for seed in (7, 7, 8))
    assert first == again != other and len({data.id for data in first}) == 50


def test_shuffled_pictures_say_nothing_of_the_answer():
    plain, shuffled = (tasks(kinds=["colour"], num_tasks=500, shuffled=shuffled) for shuffled in (False, True))
    assert [(task.key, task.data.answer) for task in plain] == [(task.key, task.data.answer) for task in shuffled]
    assert Counter(pixels(task).tobytes() for task in plain) == Counter(pixels(task).tobytes() for task in shuffled)
    right = [task.data.answer == colour(pixels(task)) for task in shuffled]
    assert 0.12 < np.mean(right) < 0.28


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("green", 1), (" Green.\n", 1), ("red", 0), ("green red", 0), ("g", 0), ("greens", 0), ("", 0), (None, 0)],
)
def test_a_reply_is_right_or_wrong(graded, reply, reward):
    trace = graded(tasks(num_tasks=1)[0].with_data(answer="green"), reply)
    assert (trace.reward, trace.metrics) == (reward, {"correct": reward})
