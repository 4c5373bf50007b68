"""Questions about a small drawn picture, answered in a word.

    user [three circles] How many shapes?    model 3

Reward of a reply: 1.0 for the right word, else 0.0; case, spaces around it and a full stop do not count. A kind of
question has five answers, each as frequent, so that a model earns 0.2 without seeing:

    colour      of one shape
    count       one to five shapes that do not touch
    position    one shape, in the middle or at one of four sides
    digit       0 to 4, in blocks

A layout is what is drawn, at which pixels. None of the train split is in the eval split, with whichever question.
"""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import AnswerTask, SplitConfig, enough
from prl.rollouts.images import url_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

__all__ = ["ShapesTaskset"]

Kind = Literal["colour", "count", "position", "digit"]
Shape = Literal["circle", "square", "triangle"]
QUESTIONS: dict[Kind, str] = {
    "colour": "Colour of the shape?",
    "count": "How many shapes?",
    "position": "Where is the shape?",
    "digit": "Which digit?",
}
BACKGROUND = (16, 16, 16)
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 180, 60),
    "blue": (60, 90, 250),
    "yellow": (240, 220, 50),
    "white": (250, 250, 250),
}
CELLS = [(column, row) for row in range(3) for column in range(3)]
"""The picture's nine parts, each with room for one shape."""
PLACES = {"left": (0, 1), "right": (2, 1), "top": (1, 0), "bottom": (1, 2), "middle": (1, 1)}
"""Cells that have a name."""
COUNTS = (1, 2, 3, 4, 5)
DIGITS = {
    "0": ("111", "101", "101", "101", "111"),
    "1": ("010", "110", "010", "010", "111"),
    "2": ("111", "001", "111", "100", "111"),
    "3": ("111", "001", "111", "001", "111"),
    "4": ("101", "101", "111", "001", "001"),
}
"""Rows of blocks; where there is a 1, a block is drawn."""


class Item(NamedTuple):
    """A thing in the picture: a shape, or a digit."""

    colour: str
    name: str
    left: int
    """Pixels from the picture's left edge."""
    top: int
    side: int
    """Pixels of a shape, or of a digit's block."""

    def __str__(self) -> str:
        return f"{self.colour} {self.name} {self.side}px at {self.left},{self.top}"


def draw(items: list[Item], size: int) -> "Image":
    """Return the picture of `items`, a square of `size` pixels."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (size, size), BACKGROUND)
    canvas = ImageDraw.Draw(image)
    for item in items:
        if item.name in DIGITS:
            _draw_digit(canvas, item)
        else:
            _draw_shape(canvas, item)
    return image


def _draw_shape(canvas: "ImageDraw", item: Item) -> None:
    fill, right, bottom = COLOURS[item.colour], item.left + item.side - 1, item.top + item.side - 1
    if item.name == "circle":
        canvas.ellipse((item.left, item.top, right, bottom), fill)
    elif item.name == "square":
        canvas.rectangle((item.left, item.top, right, bottom), fill)
    else:
        canvas.polygon([(item.left, bottom), (right, bottom), ((item.left + right) / 2, item.top)], fill)


def _draw_digit(canvas: "ImageDraw", item: Item) -> None:
    for row, blocks in enumerate(DIGITS[item.name]):
        for column, block in enumerate(blocks):
            if block == "1":
                left, top = item.left + column * item.side, item.top + row * item.side
                canvas.rectangle((left, top, left + item.side - 1, top + item.side - 1), COLOURS[item.colour])


class ShapesData(vf.TaskData):
    answer: str
    """The right word."""


class ShapesTask(AnswerTask[ShapesData]):
    """Layout and question are its identity."""

    def grade(self, reply: str) -> float:
        return float(reply.strip().removesuffix(".").lower() == self.data.answer)


class ShapesConfig(SplitConfig):
    kinds: tuple[Kind, ...] = Field(("colour", "count", "position", "digit"), min_length=1)
    """Kinds of questions, drawn with equal chance."""
    shapes: tuple[Shape, ...] = Field(("circle", "square", "triangle"), min_length=1)
    """Shapes, drawn with equal chance."""
    size: int = Field(48, ge=24, le=1024)
    """Pixels of the picture's side."""
    shuffled: bool = False
    """Each question gets the picture of another task: nothing can be learnt, whatever is seen. For a control."""


class ShapesTaskset(vf.Taskset[ShapesTask, ShapesConfig]):
    """Distinct layouts, drawn at random."""

    IN_PROCESS = True

    def load(self) -> Iterator[ShapesTask]:
        rng = random.Random(self.config.seed)
        drawn = self._drawn(rng)
        pictures = [items for _, _, items in drawn]
        if self.config.shuffled:
            rng.shuffle(pictures)
        for (question, answer, items), shown in zip(drawn, pictures, strict=True):
            picture = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=url_of(draw(shown, self.config.size))))
            content = [picture, vf.TextContentPart(text=question)]
            layout = self._layout(items)
            data = ShapesData(id=f"{question} {layout}", prompt=[vf.UserMessage(content=content)], answer=answer)
            yield ShapesTask(data, self.config.task)

    def _layout(self, items: list[Item]) -> str:
        return f"{self.config.size}px: {', '.join(map(str, items))}"

    def _drawn(self, rng: random.Random) -> list[tuple[str, str, list[Item]]]:
        config = self.config
        seen: dict[str, tuple[str, str, list[Item]]] = {}
        for _ in range(enough(config.num_tasks)):
            kind = rng.choice(config.kinds)
            answer, items = self._scene(kind, rng)
            layout = self._layout(items)
            if config.in_split(layout):
                seen[f"{QUESTIONS[kind]} {layout}"] = (QUESTIONS[kind], answer, items)
            if len(seen) == config.num_tasks:
                break
        return list(seen.values())

    def _scene(self, kind: Kind, rng: random.Random) -> tuple[str, list[Item]]:
        """Draw an answer, and what to show for it."""
        match kind:
            case "colour":
                colour = rng.choice(list(COLOURS))
                return colour, [self._shape(rng.choice(CELLS), colour, rng)]
            case "count":
                count = rng.choice(COUNTS)
                cells = sorted(rng.sample(CELLS, count))
                return str(count), [self._shape(cell, rng.choice(list(COLOURS)), rng) for cell in cells]
            case "position":
                place = rng.choice(list(PLACES))
                return place, [self._shape(PLACES[place], rng.choice(list(COLOURS)), rng)]
            case "digit":
                digit, size = rng.choice(list(DIGITS)), self.config.size
                block = rng.randint(size // 9, size // 7)
                left, top = rng.randint(0, size - 3 * block), rng.randint(0, size - 5 * block)
                return digit, [Item(rng.choice(list(COLOURS)), digit, left, top, block)]

    def _shape(self, cell: tuple[int, int], colour: str, rng: random.Random) -> Item:
        room = self.config.size // 3
        side = rng.randint(room // 2, room * 3 // 4)
        # A pixel of each edge stays free, so that neighbours do not touch.
        left, top = (place * room + rng.randint(1, room - side - 1) for place in cell)
        return Item(colour, rng.choice(self.config.shapes), left, top, side)
