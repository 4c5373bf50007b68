"""Pictures of every form become RGB; malformed ones are refused with a remedy, before they fill memory."""

import base64
import io
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from PIL import Image

from prl.rollouts.images import Origin, as_data_urls, decode, is_picture, keep, url_of
from prl.rollouts.pictures import PictureError, PictureStore, digest_of

RED = Image.new("RGB", (6, 4), (255, 0, 0))
LIMIT = 10_000


def file_of(image, form="PNG", **how):
    written = io.BytesIO()
    image.save(written, format=form, **how)
    return written.getvalue()


def png(width, height, data=b""):
    """A file that says it has so many pixels."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


RED_FILE = file_of(RED)
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(RED_FILE).decode()}}
FORMS = {
    "path": "red.png",
    "address": "file://{folder}/red.png",
    "bytes": RED_FILE,
    "pillow": RED,
    "hub": {"bytes": RED_FILE, "path": "elsewhere.png"},
    "hub, by path": {"bytes": None, "path": "red.png"},
    "openai": PART,
    "short": {"type": "image_url", "image_url": PART["image_url"]["url"]},
    "transformers": {"type": "image", "image": RED},
    "verifiers": SimpleNamespace(type="image_url", image_url=SimpleNamespace(url=PART["image_url"]["url"])),
    "mcp": SimpleNamespace(type="image", data=base64.b64encode(RED_FILE).decode(), mimeType="image/png"),
}


@pytest.mark.parametrize("form", FORMS)
def test_pictures_of_every_form_have_the_same_digest(tmp_path, form):
    (tmp_path / "red.png").write_bytes(RED_FILE)
    value = FORMS[form]
    url = url_of(value.format(folder=tmp_path) if isinstance(value, str) else value)
    store = PictureStore(tmp_path / "pictures")
    assert keep(store, url, Origin(tmp_path)) == "picture:" + digest_of(RED)
    assert is_picture(value) or isinstance(value, str | bytes) or form.startswith("hub")


def animated():
    return file_of(RED, "GIF", save_all=True, append_images=[Image.new("RGB", (6, 4), "blue")])


MALFORMED = {
    "cut off": (file_of(Image.effect_noise((64, 64), 50))[:-900], "damaged or cut off"),
    "a cut photo": (file_of(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")[:-300], "damaged or cut off"),
    "too large": (
        file_of(Image.new("L", (101, 100))),
        r"101x100 pixels, above model\.max_pixels=10000: make it smaller",
    ),
    "a bomb": (png(50_000, 50_000), "too large"),
    "half a bomb": (png(10_000, 10_000), r"above model\.max_pixels"),
    "animated": (animated(), "animated"),
    "no pixels": (png(0, 5), "no picture that can be read|0x5 pixels"),
    "no picture": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no picture that can be read"),
    "empty": (b"", "is no picture that can be read"),
    "a program's": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n", "is no picture that can be read"),
    "32 bits": (file_of(Image.new("F", (4, 4)), "TIFF"), "more than sixteen bits"),
    "no pixels, by code": (Image.new("RGB", (0, 5)), "0x5 pixels"),
    "numbers, by code": (Image.new("F", (4, 4)), "more than sixteen bits"),
    "cut off, by code": (Image.open(io.BytesIO(file_of(Image.effect_noise((64, 64), 50))[:-900])), "cut off"),
    "a bomb that is allowed": (png(10_000, 10_000), "damaged or cut off", 10**8),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pictures_are_refused(name, recwarn):
    content, why, *limit = MALFORMED[name]
    with pytest.raises(PictureError, match=why):
        decode(url_of(content), *(limit or [LIMIT]))
    assert not recwarn


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,!!", "data:image/png,abc", "data:,", "picture:abc", "picture:" + "0" * 64]
)
def test_urls_that_hold_no_picture_are_refused(tmp_path, url):
    with pytest.raises(PictureError):
        keep(PictureStore(tmp_path), url)


@pytest.mark.parametrize("value", [None, 7, {}, {"type": "image"}, {"bytes": None, "path": None}, object()])
def test_what_is_no_picture_is_refused(value):
    with pytest.raises(PictureError, match="is no picture"):
        url_of(value)


def test_paths_stay_in_their_folder(tmp_path):
    inside, outside = tmp_path / "data", tmp_path / "other"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "red.png").write_bytes(RED_FILE)
    (inside / "link.png").symlink_to(outside / "red.png")
    for path in ("../other/red.png", str(outside / "red.png"), "link.png", "/etc/hosts"):
        with pytest.raises(PictureError, match=r"lies outside of .*: set args\.image_folder"):
            decode(path, LIMIT, Origin(inside))
    assert decode(str(inside / "red.png"), LIMIT, Origin(inside)).size == (6, 4)
    with pytest.raises(PictureError, match="there is no picture"):
        decode("blue.png", LIMIT, Origin(inside))
    for path in (base64.b64encode(RED_FILE * 9).decode(), "red\0.png"):
        with pytest.raises(PictureError, match="^.{,90}is no path of a picture: write base64 as data:image/png;base64"):
            decode(path, LIMIT, Origin(inside))
    for path in ("red.png", str(inside / "red.png")):
        with pytest.raises(PictureError, match="code opens it itself"):
            decode(path, LIMIT)


def test_the_web_is_left_alone_unless_it_is_asked_for(tmp_path, monkeypatch):
    def answer(_, url, timeout):
        return io.BytesIO(RED_FILE if "red" in url else bytes(2**25 + 1))

    monkeypatch.setattr("urllib.request.OpenerDirector.open", answer)
    for address in ("https://example.org/red.png", "HTTP://example.org/red.png"):
        with pytest.raises(PictureError, match=r"set args\.fetch_images=true"):
            decode(address, LIMIT, Origin(tmp_path))
    store = PictureStore(tmp_path / "pictures")
    assert keep(store, "https://example.org/red.png", Origin(fetch=True)) == "picture:" + digest_of(RED)
    assert store.image(digest_of(RED)).size == RED.size, "it is kept: nobody knows whether it stays there"
    with pytest.raises(PictureError, match="cannot be fetched"):
        decode("https://example.org/endless.png", LIMIT, Origin(fetch=True))


class Redirects(BaseHTTPRequestHandler):
    """Sends a picture under a name with a space and a letter that is not in ASCII, and all else on to FTP."""

    def do_GET(self):
        is_red = self.path == "/r%C3%B6t%20a.png?b=%20"
        self.send_response(200 if is_red else 302)
        self.send_header("Location", "ftp://localhost/red.png")
        self.end_headers()
        self.wfile.write(RED_FILE if is_red else b"")

    def log_message(self, *_):
        pass


def test_addresses_are_spelt_as_servers_want_them_and_lead_nowhere_else(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirects) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"Http://127.0.0.1:{server.server_port}"
        assert decode(f"{at}/r\u00f6t a.png?b=%20", LIMIT, Origin(fetch=True)).tobytes() == RED.tobytes()
        with pytest.raises(PictureError, match="unknown url type: ftp"):
            decode(f"{at}/blue.png", LIMIT, Origin(fetch=True))
        server.shutdown()


@pytest.mark.parametrize("mode", ["CMYK", "LAB", "HSV", "YCbCr", "La", "RGBa", "PA", "I;16"])
def test_images_of_code_become_rgb_as_files_do(tmp_path, mode):
    store = PictureStore(tmp_path)
    image = RED.convert("LA").convert("La") if mode == "La" else Image.new(mode, RED.size)
    digest = keep(store, url_of(image)).removeprefix("picture:")
    assert store.image(digest).size == RED.size


def test_sixteen_bits_of_grey_are_read_like_those_of_colours():
    grey = decode(url_of(file_of(Image.new("I;16", (2, 2), 40_000))), LIMIT)
    assert grey.getpixel((0, 0)) == (156, 156, 156), "40,000 / 256"


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        (Image.new("CMYK", (2, 2), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.new("L", (2, 2), 7), (7, 7, 7)),
        (Image.new("RGBA", (2, 2), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("LA", (2, 2), (0, 0)), (255, 255, 255)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_other_colours_become_rgb_on_white(image, pixel):
    form = "TIFF" if image.mode == "CMYK" else "PNG"
    found = decode(url_of(file_of(image, form)), LIMIT)
    assert found.mode == "RGB" and found.getpixel((1, 1)) == pixel


def test_a_palette_may_have_a_transparent_colour():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    found = decode(url_of(file_of(image, transparency=1)), LIMIT)
    assert [found.getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]


def test_a_photo_is_turned_as_its_camera_was():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    assert decode(url_of(file_of(RED, "JPEG", exif=exif)), LIMIT).size == (4, 6)


def test_pictures_of_data_are_written_once_they_are_asked_for(tmp_path):
    (tmp_path / "red.png").write_bytes(RED_FILE)
    store = PictureStore(tmp_path / "pictures")
    keep(store, "red.png", Origin(tmp_path))
    assert not store.folder.exists()
    assert store.image(digest_of(RED)).tobytes() == RED.tobytes()
    (tmp_path / "red.png").unlink()
    assert PictureStore(store.folder).image(digest_of(RED)).tobytes() == RED.tobytes()
    (tmp_path / "blue.png").write_bytes(RED_FILE)
    other = PictureStore(tmp_path / "others")
    keep(other, "blue.png", Origin(tmp_path))
    for content in (file_of(Image.new("RGB", (6, 4), "blue")), b""):
        (tmp_path / "blue.png").write_bytes(content)
        with pytest.raises(PictureError, match="has changed since the run began|no picture that can be read"):
            other.image(digest_of(RED))
    (tmp_path / "blue.png").write_bytes(RED_FILE)
    assert other.image(digest_of(RED)).tobytes() == RED.tobytes(), "a file may be away for a while"


def test_pictures_that_come_as_bytes_lie_in_the_store_as_they_came(tmp_path):
    store = PictureStore(tmp_path)
    photo = Image.effect_noise((64, 64), 50).convert("RGB")
    given = file_of(photo, "JPEG")
    digest = keep(store, url_of(given)).removeprefix("picture:")
    [file] = tmp_path.iterdir()
    assert file.read_bytes() == given, "neither in memory nor as PNG"
    assert store.image(digest).size == photo.size
    assert [each.name for each in tmp_path.iterdir()] == [f"{digest}.png"]
    assert keep(store, url_of(given)) == f"picture:{digest}" and len(list(tmp_path.iterdir())) == 1


def test_a_passing_store_leaves_nothing_behind():
    store = PictureStore.passing(LIMIT)
    folder = store.folder
    store.keep(RED)
    assert store.max_pixels == LIMIT and folder.exists()
    del store
    assert not folder.exists()


def test_a_server_without_the_store_gets_the_pictures_themselves(tmp_path):
    store = PictureStore(tmp_path)
    reference = {"type": "image_url", "image_url": {"url": "picture:" + store.keep(RED)}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "?"}, reference]},
        {"role": "user", "content": "!"},
    ]
    sent = as_data_urls(messages, store)
    assert sent[1] == messages[1] and sent[0]["content"][0] == messages[0]["content"][0]
    assert decode(url_of(sent[0]["content"][1]), LIMIT).tobytes() == RED.tobytes()
    assert messages[0]["content"][1] is reference
