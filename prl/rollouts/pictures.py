"""The pictures of a run, each once: as they were given, and as the model's processor made them.

They lie in a folder that every process of the run sees. Messages, rows and records name them by digest.
"""

import hashlib
import io
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prl.base.files import write_atomically
from prl.rollouts.inputs import Picture

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    Features = dict[str, NDArray]
    """Arrays by the names under which the model takes them, such as `pixel_values` and `image_grid_thw`."""

FOLDER = "pictures"
"""The store's folder in a run directory."""
SCHEME = "picture:"
"""Beginning of the `url` of a message's image part that names a picture of the store; its digest follows."""
HELD_BYTES = 2**28
"""Features that a process keeps in memory, so that it reads each picture once."""
RENDERED_AGAIN = "run.resume=<the run's directory> goes on, and renders it again"
"""The remedy for features that are lost."""
MAX_PIXELS = 2**24
"""The most pixels of a picture: `model.max_pixels` where nothing else is said."""


class PictureError(ValueError):
    """A picture that is not there, or not the one that was meant."""

    kind = "env"


class PictureStore:
    """The pictures in a folder, by digest."""

    def __init__(self, folder: Path, max_pixels: int = MAX_PIXELS):
        self.folder = folder
        self.max_pixels = max_pixels
        """The most pixels of a picture that is decoded."""
        self.sizes: dict[str, tuple[int, int]] = {}
        """Width and height of the pictures that this process has kept."""
        self.reads = 0
        """Files of features that this process has read."""
        self._held: OrderedDict[str, Features] = OrderedDict()
        self._bytes = 0
        self._again: dict[str, Callable[[], Image]] = {}

    @classmethod
    def passing(cls, max_pixels: int) -> "PictureStore":
        """Return a store for as long as it is used: of a dry run, which leaves nothing behind."""
        store = cls(Path(tempfile.mkdtemp(prefix="prl-pictures-")), max_pixels)
        weakref.finalize(store, shutil.rmtree, store.folder, ignore_errors=True)
        return store

    def keep(self, image: "Image", again: "Callable[[], Image] | None" = None) -> str:
        """Keep a picture, which is in RGB, and return its digest.

        One that can be read `again` is written once it is asked for: a data set may have more than a run comes to.
        """
        digest = digest_of(image)
        self.sizes[digest] = image.size
        if again is not None:
            self._again[digest] = again
        else:
            self._write(image, digest)
        return digest

    def _write(self, image: "Image", digest: str) -> None:
        file = self.file_of(digest)
        if not file.exists():
            write_atomically(file, png_of(image))

    def image(self, digest: str) -> "Image":
        """Return a picture in RGB. Raises PictureError if it is not there."""
        from PIL import Image

        again = self._again.get(digest)
        if again is not None:
            image = again()
            if digest_of(image) != digest:
                raise PictureError(f"the picture {digest[:12]} has changed since the run began")
            self._write(image, digest)
            self.given_file(digest).unlink(missing_ok=True)
            self._again.pop(digest, None)  # only now: a file that is away for a while is read once it is there again
            return image
        try:
            with Image.open(self.file_of(digest)) as opened:
                return opened.convert("RGB")
        except OSError as error:
            raise PictureError(f"the picture {digest[:12]} is not in {self.folder}: {error}") from error

    def file_of(self, digest: str) -> Path:
        """Return the file of a picture, which may not be there. Raises PictureError for what is no digest."""
        if not is_digest(digest):
            raise PictureError(f"{digest[:80]!r} is no digest of a picture")
        return self.folder / f"{digest}.png"

    def given_file(self, digest: str) -> Path:
        """Return the file of a picture as it was given, until it is written."""
        return self.file_of(digest).with_suffix(".given")

    def keep_features(self, digest: str, features: "Features") -> str:
        """Keep what the processor made of a picture, as C-contiguous arrays; return its hash (`Picture.features`)."""
        from safetensors.numpy import save

        hashed = hash_of(features)
        file = self.features_file(digest, hashed)
        if not file.exists():
            write_atomically(file, save(features))
        return hashed

    def features_file(self, digest: str, hashed: str) -> Path:
        """Return the file of what a processor made of a picture; models differ in that."""
        return self.file_of(digest).with_suffix(f".{hashed[:16]}.safetensors")

    def features(self, picture: Picture) -> "Features":
        """Return what the processor made of a picture. Raises PictureError if it is not there, or another."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        name = picture.digest + picture.features
        held = self._held.get(name)
        if held is not None:
            self._held.move_to_end(name)
            return held
        try:
            features = load_file(self.features_file(picture.digest, picture.features))
        except (OSError, SafetensorError) as error:
            problem = f"no features of the picture {picture.digest[:12]} in {self.folder} ({error})"
            raise PictureError(f"{problem}: {RENDERED_AGAIN}") from error
        self.reads += 1
        if hash_of(features) != picture.features:
            problem = f"the features of the picture {picture.digest[:12]} are not those that were rendered"
            raise PictureError(
                f"{problem}: remove {self.features_file(picture.digest, picture.features)}; {RENDERED_AGAIN}"
            )
        self._hold(name, features)
        return features

    def _hold(self, name: str, features: "Features") -> None:
        self._held[name] = features
        self._bytes += size_of(features)
        while self._bytes > HELD_BYTES and len(self._held) > 1:
            self._bytes -= size_of(self._held.popitem(last=False)[1])


def is_digest(text: str) -> bool:
    """Return whether a text could be a picture's digest."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def digest_of(image: "Image") -> str:
    """Return the SHA-256 of a picture's pixels and size; it is in RGB."""
    return hashlib.sha256(f"{image.width}x{image.height}:".encode() + image.tobytes()).hexdigest()


def png_of(image: "Image") -> bytes:
    """Return an image as the content of a file."""
    written = io.BytesIO()
    image.save(written, format="PNG", compress_level=1)
    return written.getvalue()


def joined(features: "Sequence[Features]") -> "Features":
    """Return the features of several pictures as a model takes them, by name."""
    import numpy

    return {name: numpy.concatenate([each[name] for each in features]) for name in features[0]}


def hash_of(features: "Mapping[str, NDArray]") -> str:
    """Return the SHA-256 of arrays, with their names, shapes and dtypes."""
    digest = hashlib.sha256()
    for name, values in sorted(features.items()):
        digest.update(f"{name} {values.dtype} {values.shape} ".encode() + values.tobytes())
    return digest.hexdigest()


def size_of(features: "Mapping[str, NDArray]") -> int:
    """Return the bytes of arrays."""
    return sum(values.nbytes for values in features.values())
