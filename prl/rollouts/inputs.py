"""Inputs of models: token ids, and the pictures whose placeholder tokens are among them.

A picture is known by its digest, and lies in the run's store (`prl.rollouts.pictures`). Equal ids are equal inputs only
where the pictures are equal, too: whoever compares inputs compares their `keys`.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec


class Picture(msgspec.Struct, array_like=True, frozen=True):
    """A picture in a sequence of tokens."""

    start: int
    """Place of its first placeholder token in the sequence."""
    length: int
    """Number of its placeholder tokens, which lie side by side."""
    digest: str
    """SHA-256 of its decoded pixels, hexadecimal."""
    width: int
    height: int
    """Its size in pixels, before the model's processor changes it."""
    features: str
    """SHA-256 of what the model's processor made of it, hexadecimal."""

    @property
    def stop(self) -> int:
        """The place behind its last placeholder token."""
        return self.start + self.length

    def moved(self, by: int) -> "Picture":
        """Return the picture `by` places further on."""
        return msgspec.structs.replace(self, start=self.start + by)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The input of a model: the token ids of a sequence, and the pictures in it, in their order."""

    token_ids: list[int]
    pictures: tuple[Picture, ...] = ()

    def __len__(self) -> int:
        """The number of tokens, placeholders included."""
        return len(self.token_ids)

    def then(self, token_ids: Sequence[int]) -> "ModelInput":
        """Return this input with text behind it."""
        return replace(self, token_ids=[*self.token_ids, *token_ids])

    def behind(self, token_ids: Sequence[int]) -> "ModelInput":
        """Return this input with text in front of it."""
        moved = tuple(picture.moved(len(token_ids)) for picture in self.pictures)
        return ModelInput([*token_ids, *self.token_ids], moved)

    @property
    def keys(self) -> list[int]:
        """A number for each token: two inputs begin alike as far as their keys are equal."""
        return keys_of(self.token_ids, self.pictures)

    def pieces(self) -> Iterator[list[int] | Picture]:
        """Yield text, as token ids, and pictures, in their order."""
        place = 0
        for picture in self.pictures:
            if picture.start > place:
                yield self.token_ids[place : picture.start]
            yield picture
            place = picture.stop
        if place < len(self.token_ids):
            yield self.token_ids[place:]


def pictures_in(pictures: Sequence[Picture], part: slice) -> Sequence[Picture]:
    """Return the pictures that begin in a part of the tokens, of pictures in their order."""
    first, stop = (bisect_left(pictures, place, key=lambda picture: picture.start) for place in (part.start, part.stop))
    return pictures[first:stop]


def keys_of(token_ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Return the token ids of a sequence; a placeholder's is a negative number that stands for its picture."""
    keys = list(token_ids)
    for picture in pictures:
        # 60 bits of the digest, so that it fits into an int64.
        keys[picture.start : picture.stop] = [-1 - int(picture.digest[:15], 16)] * picture.length
    return keys
