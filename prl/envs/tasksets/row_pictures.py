"""The pictures of a row of `env=jsonl`: those of its column `images`, and the parts of its messages.

A picture of the column is shown where the messages have a mark, the text `<image>` (not in a system prompt) or a part
without a picture of its own, as `{"type": "image"}`. Without any mark all are shown in front of the first message of
the user's.
"""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from prl.envs.tasksets.layouts import MARKED, decoded
from prl.rollouts.images import is_picture, url_of

EMPTY: tuple[Any, ...] = (None, "", [], "[]")
"""Values of a column in rows without a picture."""
SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Ends of a picture's name: a column `image` may hold another thing, such as the image of a container."""
MARK = "<image>"
"""Place of a picture in a text."""


def urls_in(row: dict[str, Any]) -> list[str]:
    """Return the pictures of a row's column as URLs and paths.

    Raises ValueError for two columns of pictures and for videos; PictureError, which is one, for what is no picture.
    """
    if row.get("videos") not in EMPTY:
        raise ValueError("its column videos is not empty, and prl shows a model no videos: leave such rows out")
    one, several = row.get("image"), row.get("images")
    if several in EMPTY:
        several = [one] if is_likely_picture(one) else []
    elif is_likely_picture(one):
        raise ValueError("both of its columns image and images hold pictures: leave one out")
    if isinstance(several, str) and several.startswith("["):  # a column of a CSV file has texts alone
        several = decoded(several, whole=True)
    listed = several if isinstance(several, list) else [several]
    return [url_of(each) for each in listed if each is not None]


def is_likely_picture(value: Any) -> bool:
    """Return whether the value of a column `image` is a picture, by its kind, or as a text by its beginning or end."""
    if isinstance(value, str):
        return value.startswith("data:image") or value.lower().endswith(SUFFIXES)
    return isinstance(value, bytes | dict | list) or is_picture(value)


def with_pictures(messages: list[Any], urls: list[str]) -> list[Any]:
    """Return messages with the pictures of their row in them; raise ValueError where their numbers do not fit."""
    parts = [list(marked_parts(message, bool(urls))) for message in messages]
    marks = sum(part is MARKED for of_message in parts for part in of_message)
    if marks == 0 and urls:
        first = next((place for place, message in enumerate(messages) if message.role == "user"), None)
        if first is None:
            raise ValueError(f"it has {len(urls)} pictures, and no message of the user's to show them in")
        parts[first] = [*[MARKED] * len(urls), *parts[first]]
    elif marks != len(urls):
        raise ValueError(f"its messages have {marks} places for pictures ({MARK}), and it has {len(urls)} pictures")
    given = iter(urls)
    return [
        message.model_copy(update={"content": [next_part(part, given) for part in of_message]})
        if any(part is MARKED for part in of_message)
        else message
        for message, of_message in zip(messages, parts, strict=True)
    ]


def marked_parts(message: Any, in_text: bool) -> Iterator[Any]:
    """Yield the parts of a message, and `MARKED` in the places of the row's pictures; with `in_text` also at `MARK`."""
    content = message.content or ""
    for part in [vf.TextContentPart(text=content)] if isinstance(content, str) else content:
        text = getattr(part, "text", None)
        if text is None:
            yield MARKED if part.image_url.url == MARKED else part
        elif not in_text or message.role in ("system", "assistant"):
            yield part
        else:
            for number, piece in enumerate(text.split(MARK)):
                if number:
                    yield MARKED
                if piece:
                    yield vf.TextContentPart(text=piece)


def next_part(part: Any, given: Iterator[str]) -> Any:
    """Return a part, or the next of the row's pictures in the place of a mark."""
    return vf.ImageUrlContentPart(image_url={"url": next(given)}) if part is MARKED else part
