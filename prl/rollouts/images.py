"""Read pictures as data and code give them, and turn them into RGB.

A picture may be a path, a data URL, a web address, bytes, one of Pillow's, a mapping as data sets on the hub have it
(`{"bytes": …, "path": …}`), or a message's part of OpenAI's, verifiers' or MCP's. What is transparent becomes white, as
in engines; the orientation in a photo's EXIF is applied, as transformers does. Of sixteen bits a channel the upper
eight are read, of grey as of colours, of which Pillow has no more.
"""

import base64
import io
import sys
import time
import warnings
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.base.files import write_atomically
from prl.base.text import in_one_line
from prl.rollouts.pictures import SCHEME, PictureError, PictureStore, digest_of, png_of

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read; others start programs, such as EPS, or are rare."""
PARTS = ("image", "image_url")
"""The `type` of a message's part that is a picture."""
FETCH_S = 20.0
"""[s] Time for a picture to arrive from the web."""
IN_URLS = "!#$%&'()*+,/:;=?@[]~"
"""Characters of an address that mean something in it, or are written as they are."""
FETCH_BYTES = 2**25
"""The most bytes that are taken from the web for a picture."""
EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV")
"""Pillow's modes of at most eight bits a channel."""
SIXTEEN_BITS = "I;16"
"""Beginning of Pillow's modes of sixteen bits, all of them grey."""
WEB = ("http", "https")
"""Schemes of addresses from which pictures are fetched."""


@dataclass(frozen=True)
class Origin:
    """The places from where data may take its pictures. Code may take none by path or address: it can read them."""

    folder: Path | None = None
    """The folder of the files that paths name; None = no path is read."""
    fetch: bool = False
    """Whether pictures are taken from the web."""


NOWHERE = Origin()
HOLDERS = ("data", "bytes", "image", "image_url", "url", "path")
"""Keys under which a mapping may hold a picture."""


def is_picture(value: Any) -> bool:
    """Return whether a value of code's or a message's part is a picture."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return (isinstance(kind, str) and kind in PARTS) or is_of_pillow(value)


def is_of_pillow(value: Any) -> bool:
    """Return whether a value is one of Pillow's images; Pillow is not loaded for that."""
    return any(cls.__module__ == "PIL.Image" and cls.__name__ == "Image" for cls in type(value).__mro__)


def url_of(value: Any) -> str:
    """Return the picture that a value is as text: its path or address, or a data URL.

    Raises PictureError for what is none, and for an image of Pillow's that cannot be read.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return data_url(value)
    if is_of_pillow(value):
        return data_url(png_of(pixels_of(value, "given by code", sys.maxsize)), "image/png")
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    if isinstance(fields.get("data"), str):
        return f"data:{fields.get('mimeType') or ''};base64,{fields['data']}"
    inner = next((fields[key] for key in HOLDERS if fields.get(key)), None)
    if inner is None:
        raise PictureError(f"{str(value)[:80]!r} is no picture: neither a path, a data URL nor bytes")
    return url_of(inner)


def data_url(content: bytes, kind: str = "image/*") -> str:
    """Return a file's content as a URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def keep(store: PictureStore, url: str, origin: Origin = NOWHERE) -> str:
    """Keep the picture of a URL or a path in the store, and return the reference to it (`picture:<digest>`).

    One that is in a file is written to the store once it is shown to a model. One that the URL holds is put there as it
    came: a data set of photos has no place in memory, and to make a PNG of each takes long. Raises PictureError.
    """
    if url.startswith(SCHEME):
        if url.removeprefix(SCHEME) not in store.sizes:
            store.image(url.removeprefix(SCHEME))
        return url
    if url.startswith("data:"):
        return SCHEME + _keep_as_given(store, url)
    image = decode(url, store.max_pixels, origin)
    if is_on_web(url):
        return SCHEME + store.keep(image)
    return SCHEME + store.keep(image, lambda: decode(url, store.max_pixels, origin))


def _keep_as_given(store: PictureStore, url: str) -> str:
    """Keep the picture that a data URL holds, as it came, and return its digest. Raises PictureError."""
    name = shortened(url)
    content = content_in(url, name)
    image = read(io.BytesIO(content), name, store.max_pixels)
    digest = digest_of(image)
    if digest not in store.sizes:
        file = store.given_file(digest)
        write_atomically(file, content)
        store.keep(image, lambda: decode(file.name, store.max_pixels, Origin(store.folder)))
    return digest


def is_on_web(url: str) -> bool:
    """Return whether a URL is an address on the web."""
    return url.partition("://")[0].lower() in WEB


def decode(url: str, max_pixels: int, origin: Origin = NOWHERE) -> "Image":
    """Return a picture in RGB; raise PictureError, with a remedy, for one that cannot be read or is too large.

    The size is read from the header, so that no more than `max_pixels` are decoded.
    """
    name = shortened(url)
    return read(content_of(url, name, origin), name, max_pixels)


def read(file: "Path | io.BytesIO", name: str, max_pixels: int) -> "Image":
    """Return the picture in a file, as `decode` does."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `check` knows what is too large
            opened = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise PictureError(f"the picture {name} is too large ({error}): make it smaller") from error
    except Exception as error:  # a header may raise anything
        raise PictureError(f"{name} is no picture that can be read ({', '.join(FORMATS)}): leave it out") from error
    with closing(opened):
        return pixels_of(opened, name, max_pixels)


def shortened(url: str) -> str:
    """Return a URL or a path for a message: of data the beginning says what it is, of a long path the end."""
    if len(url) <= 80:
        return url
    return f"{url[:60]}…" if url.startswith("data:") else f"…{url[-60:]}"


def pixels_of(image: "Image", name: str, max_pixels: int) -> "Image":
    """Return an image, of which maybe only the header was read, in RGB and turned; raise PictureError if it is bad."""
    from PIL import ImageOps

    check(image, name, max_pixels)
    try:
        image.load()
        return in_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # Pillow's decoders raise whatever they meet
        problem = f"is damaged or cut off ({in_one_line(error)})"
        raise PictureError(f"the picture {name} {problem}: get the file again, or leave it out") from error


def check(image: "Image", name: str, max_pixels: int) -> None:
    """Raise PictureError for an image, of which only the header was read, that no model is to be shown."""
    width, height = image.size
    is_animated = getattr(image, "is_animated", False) and image.format != "MPO"  # a photo with its preview
    size = f"has {width}x{height} pixels"
    is_known = image.mode in EIGHT_BITS or image.mode.startswith(SIXTEEN_BITS)
    problems = [
        (width * height == 0, f"{size}: leave it out"),
        (width * height > max_pixels, f"{size}, above model.max_pixels={max_pixels}: make it smaller, or raise that"),
        (is_animated, "is animated or has several pages: save one of its frames"),
        (not is_known, f"has more than sixteen bits a channel (mode {image.mode}): save it with eight"),
    ]
    for holds, problem in problems:
        if holds:
            raise PictureError(f"the picture {name} {problem}")


def in_rgb(image: "Image") -> "Image":
    """Return an image in RGB, on white where it is transparent."""
    from PIL import Image

    if image.mode.startswith(SIXTEEN_BITS):
        image = image.convert("I").point([value >> 8 for value in range(2**16)], "L")
    elif image.mode == "La":
        image = image.convert("LA")  # the only mode that Pillow makes of it
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def content_of(url: str, name: str, origin: Origin) -> "Path | io.BytesIO":
    """Return the file that a URL or a path names. Raises PictureError."""
    if url.startswith("data:"):
        return io.BytesIO(content_in(url, name))
    if is_on_web(url):
        if not origin.fetch:
            raise PictureError(f"the picture {name} is on the web: download it, or set args.fetch_images=true")
        return io.BytesIO(fetched(url, name))
    if origin.folder is None:
        raise PictureError(f"the picture {name} is named by its path: code opens it itself (PIL.Image.open)")
    try:
        file = (origin.folder / url.removeprefix("file://")).resolve()
        is_there = file.is_file()
    except (OSError, ValueError) as error:  # it is too long, or has a null byte
        raise PictureError(f"{name!r} is no path of a picture: write base64 as data:image/png;base64,…") from error
    if not file.is_relative_to(origin.folder.resolve()):
        raise PictureError(f"the picture {name} lies outside of {origin.folder}: set args.image_folder to its folder")
    if not is_there:
        raise PictureError(f"there is no picture {name} in {origin.folder}: args.image_folder names another folder")
    return file


def content_in(url: str, name: str) -> bytes:
    """Return the content of a data URL. Raises PictureError."""
    head, _, text = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not in base64")
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise PictureError(f"the data URL {name} cannot be read: {error}") from error


def fetched(url: str, name: str) -> bytes:
    """Return a picture's file from the web. Raises PictureError."""
    from http.client import HTTPException
    from urllib import request
    from urllib.parse import quote

    opener = request.OpenerDirector()  # with no handler of files and FTP, to which a server may redirect
    proxies = {scheme: proxy for scheme, proxy in request.getproxies().items() if scheme in WEB}
    handlers: list[request.BaseHandler] = [request.ProxyHandler(proxies), request.HTTPHandler()]
    handlers += [request.HTTPSHandler(), request.HTTPRedirectHandler(), request.UnknownHandler()]
    for handler in [*handlers, request.HTTPDefaultErrorHandler(), request.HTTPErrorProcessor()]:
        opener.add_handler(handler)
    ask, content, deadline = opener.open, b"", time.monotonic() + FETCH_S
    try:
        with ask(quote(url, safe=IN_URLS), timeout=FETCH_S) as reply:
            while block := reply.read1(2**16):
                content += block
                if len(content) > FETCH_BYTES or time.monotonic() > deadline:
                    raise OSError(f"more than {FETCH_BYTES} bytes or {FETCH_S:g} s")
    except (OSError, ValueError, HTTPException) as error:
        raise PictureError(f"the picture {name} cannot be fetched: {in_one_line(error)}") from error
    return content


def as_data_urls(messages: list[dict[str, Any]], store: PictureStore) -> list[dict[str, Any]]:
    """Return messages in OpenAI's format with the store's pictures in them, for a server that has no such store."""
    return [
        message | {"content": [_as_data_url(part, store) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _as_data_url(part: dict[str, Any], store: PictureStore) -> dict[str, Any]:
    digest = digest_in(part)
    if digest is None:
        return part
    return {"type": "image_url", "image_url": {"url": data_url(png_of(store.image(digest)), "image/png")}}


def digest_in(part: Any) -> str | None:
    """Return the digest of the store's picture that a part of a message refers to; None for another part."""
    source = part.get("image_url") if isinstance(part, dict) else None
    url = source.get("url") if isinstance(source, dict) else None
    return url.removeprefix(SCHEME) if isinstance(url, str) and url.startswith(SCHEME) else None


def digests_in(messages: list[dict[str, Any]]) -> list[str]:
    """Return the digests of the pictures in messages in OpenAI's format, in their order."""
    contents = (message["content"] for message in messages if isinstance(message.get("content"), list))
    digests = map(digest_in, chain.from_iterable(contents))
    return [digest for digest in digests if digest is not None]
