"""Inputs with pictures begin alike only where ids and pictures are equal; the store keeps each picture once."""

import numpy as np
import pytest
from PIL import Image

from prl.rollouts.inputs import ModelInput, Picture, keys_of
from prl.rollouts.pictures import PictureError, PictureStore, digest_of

RED, BLUE = (digest_of(Image.new("RGB", (4, 4), colour)) for colour in ("red", "blue"))


def picture(start, digest=RED, length=2):
    return Picture(start, length, digest, 4, 4, "f" * 64)


def test_equal_ids_are_equal_inputs_only_where_the_pictures_are():
    ids = [5, 9, 9, 6]
    red, blue = keys_of(ids, [picture(1)]), keys_of(ids, [picture(1, BLUE)])
    assert keys_of(ids, ()) == ids
    assert red[0] == 5 and red[3] == 6 and red[1] == red[2] < 0
    assert red != blue and red == keys_of(ids, [picture(1)])
    assert max(map(abs, red)) < 2**62, "they fit into int64"


def test_pieces_are_text_and_pictures_in_their_order():
    one, two = picture(1), picture(3, BLUE, 1)
    whole = ModelInput([5, 9, 9, 9, 6, 7], (one, two))
    assert list(whole.pieces()) == [[5], one, two, [6, 7]]
    assert list(ModelInput([9, 9], (picture(0),)).pieces()) == [picture(0)]
    assert list(ModelInput([1, 2]).pieces()) == [[1, 2]]
    assert whole.then([8]) == ModelInput([5, 9, 9, 9, 6, 7, 8], (one, two)) and len(whole) == 6
    assert whole.behind([1, 2]).pictures == (picture(3), picture(5, BLUE, 1))


def test_the_store_keeps_each_picture_once(tmp_path):
    store = PictureStore(tmp_path / "pictures")
    image = Image.effect_noise((5, 3), 60).convert("RGB")
    digest = store.keep(image)
    assert store.keep(image.copy()) == digest and len(list(store.folder.iterdir())) == 1
    assert store.image(digest).tobytes() == image.tobytes()
    assert digest_of(image.transpose(Image.Transpose.ROTATE_90)) != digest
    features = {"pixel_values": np.arange(6, dtype=np.float32).reshape(2, 3), "grid": np.array([[1, 2, 2]])}
    known = Picture(0, 1, digest, 5, 3, store.keep_features(digest, features))
    other = PictureStore(store.folder)
    for _ in range(3):
        read = other.features(known)
    assert other.reads == 1 and all(np.array_equal(read[name], features[name]) for name in features)
    assert read["grid"].dtype == np.int64
    another = Picture(0, 1, digest, 5, 3, store.keep_features(digest, {"pixel_values": np.zeros(2)}))
    assert other.features(another)["pixel_values"].shape == (2,), "another model's processor made others of it"
    assert np.array_equal(PictureStore(store.folder).features(known)["grid"], features["grid"])


def test_another_picture_than_the_one_meant_is_refused(tmp_path):
    store = PictureStore(tmp_path)
    digest = store.keep(Image.new("RGB", (2, 2)))
    known = Picture(0, 1, digest, 2, 2, store.keep_features(digest, {"pixel_values": np.zeros(3, np.float32)}))
    file = store.features_file(digest, known.features)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(PictureError, match="not those that were rendered"):
        store.features(known)
    file.write_bytes(b"{}")
    with pytest.raises(PictureError, match="no features"):
        store.features(known)
    for name in ("../../etc/passwd", "A" * 64, ""):
        with pytest.raises(PictureError, match="no digest"):
            store.image(name)
    with pytest.raises(PictureError, match="is not in"):
        store.image("0" * 64)
