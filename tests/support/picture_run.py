"""A made-up run whose prompts have pictures."""

import json

import msgspec
from PIL import Image

from prl.rollouts.inputs import Picture
from prl.rollouts.pictures import FOLDER, PictureStore

GONE = "ab" * 32
"""Digest of a picture whose file is not there."""


def show_pictures(run, size=(6, 4)):
    """Give each prompt a picture behind its first character, and one that is gone at its end. Returns the digest."""
    image = Image.new("RGB", size, (200, 30, 30))
    digest = PictureStore(run / FOLDER).keep(image)
    sent = msgspec.to_builtins([Picture(2, 3, digest, *size, "f" * 64), Picture(9, 4, GONE, 20, 10, "f" * 64)])
    for path in (run / "rollouts").glob("*.jsonl"):
        rewrite(path, lambda line: add_to_prompt(line, sent))
    for path in (run / "tokens").glob("*/*.jsonl"):
        rewrite(path, lambda line: line | {"pictures": [sent[0][:3]]})
    return digest


def add_to_prompt(line, sent):
    prompt = line["messages"][0]
    prompt["pictures"] = [[1, sent[0][2]], [len(prompt["content"]), GONE]]
    return line | {"pictures": sent}


def rewrite(path, change):
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
