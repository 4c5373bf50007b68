"""Checkpoints appear whole or not at all, and a damaged one is refused by name."""

import hashlib
import json
import shutil

import pytest

from prl.base import checkpoint_folders
from prl.base.errors import ConfigError
from prl.base.files import writing


@pytest.fixture
def made(tmp_path):
    """`made(step)`: a finished checkpoint."""

    def make(step=20):
        with writing(checkpoint_folders.part_path(tmp_path, step)) as folder:
            (folder / "model.safetensors").write_bytes(b"weights" * 100)
            (folder / "state").mkdir()
            (folder / "state" / "trainer.json").write_text("{}")
        assert checkpoint_folders.parts_of(tmp_path) == [step] and step not in checkpoint_folders.steps_of(tmp_path)
        checkpoint_folders.finish(tmp_path, step)
        return checkpoint_folders.checkpoint_path(tmp_path, step)

    return make


def test_it_is_verified(made, tmp_path):
    folder = made()
    assert checkpoint_folders.verify(folder) == 20
    assert checkpoint_folders.steps_of(tmp_path) == [20] and checkpoint_folders.parts_of(tmp_path) == []
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert listed["model.safetensors"] == {"bytes": 700, "sha256": hashlib.sha256(b"weights" * 100).hexdigest()}
    assert set(listed) == {"model.safetensors", "state/trainer.json"}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("model.safetensors", flip, "the content of model.safetensors is not what was written"),
        ("model.safetensors", lambda path: path.write_bytes(b"weights"), "has 7 bytes instead of 700"),
        ("state/trainer.json", lambda path: path.unlink(), "state/trainer.json is missing"),
        ("manifest.json", lambda path: path.write_text(path.read_text()[:-9]), "manifest.json cannot be read"),
        ("manifest.json", lambda path: path.unlink(), "it has no manifest.json"),
    ],
)
def test_damage_is_named(made, name, damage, says):
    folder = made()
    damage(folder / name)
    with pytest.raises(ConfigError, match="step_000020") as refused:
        checkpoint_folders.verify(folder)
    assert says in str(refused.value)


def test_a_model_is_verified_without_its_state(made):
    folder = made()
    (folder / "state" / "trainer.json").unlink()
    (folder / "state" / "mine.json").write_text("{}")
    assert checkpoint_folders.verify(folder, state=False) == 20


def test_a_checkpoint_named_as_another_step_is_refused(made):
    folder = made(4)
    copy = folder.with_name("step_000099")
    shutil.copytree(folder, copy)
    with pytest.raises(ConfigError, match=r"step_000099 is damaged: .*of step 4, under another step's name"):
        checkpoint_folders.verify(copy)
    assert checkpoint_folders.verify(copy, state=False) == 4, "its model is whole"
    assert checkpoint_folders.verify(folder.rename(folder.with_name("step_000004.bak"))) == 4


def test_a_part_that_fails_leaves_nothing(tmp_path):
    with (
        pytest.raises(OSError, match="full"),
        writing(checkpoint_folders.part_path(tmp_path, 3)) as folder,
    ):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("the disk is full")
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [
        (None, None, [0, 2, 4, 6, 8, 10]),
        (2, None, [8, 10]),
        (1, 4, [4, 8, 10]),
        (3, 6, [6, 8, 10]),
        (9, None, [0, 2, 4, 6, 8, 10]),
    ],
)
def test_what_is_kept(made, tmp_path, last, every, kept):
    for step in range(0, 11, 2):
        made(step)
    checkpoint_folders.prune(tmp_path, keep_last=last, keep_every=every)
    assert checkpoint_folders.steps_of(tmp_path) == kept
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(kept)


def test_a_copy_beside_the_checkpoints_is_none_of_them(made, tmp_path):
    for step in (2, 4):
        shutil.copytree(made(step), tmp_path / "checkpoints" / f"step_{step:06d}.bak")
    for name in (".step_000006.bak", ".step_000006.writing", "step_4"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert checkpoint_folders.steps_of(tmp_path) == [2, 4] and checkpoint_folders.parts_of(tmp_path) == []
    checkpoint_folders.prune(tmp_path, keep_last=1, keep_every=None)
    assert checkpoint_folders.steps_of(tmp_path) == [4]
    assert len(list((tmp_path / "checkpoints").glob("*.bak"))) == 3, "whoever made it removes it"
