"""Files and messages that hold no text at all where there should be one: each reader says so in its own words.

A bit that turned within a string makes bytes that are no UTF-8, for which msgspec raises no error of its own.
"""

import json
from types import SimpleNamespace

import pytest

from prl.config.sweeps import OptimizedMetricConfig
from prl.errors import PrlError
from prl.rollouts.record import read_records
from prl.runs.result import read_result
from prl.tools.sweep.command import RECORD, read_record
from prl.tools.sweep.metric import optimized
from prl.trainer.checkpoint import load_state
from prl.transport.checkpoints import MANIFEST, verify
from prl.transport.files import FileTransport

FIELDS = {"step": 1, "files": {"abc": {}}, "varied": ["abc"], "host": "abc", "status": "abc", "env": "abc"}
"""Texts where the readers expect some."""
TURNED = {"high bit": json.dumps(FIELDS).replace("abc", "\xe1bc").encode("latin-1"), "deep": b"[" * 100_000}


REFUSING = {
    "a checkpoint's manifest": (MANIFEST, verify),
    "the number of a sweep": ("metrics.jsonl", lambda folder: optimized(folder, OptimizedMetricConfig())),
    "a sweep's record": (RECORD, read_record),
    "metrics": ("weights/step_000001/metrics.json", lambda folder: FileTransport(folder).receive_metrics(1)),
}


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.mark.parametrize("how", TURNED)
@pytest.mark.parametrize("name", REFUSING)
def test_a_reader_names_its_file(tmp_path, name, how):
    file, read = REFUSING[name]
    put(tmp_path / file, TURNED[how])
    with pytest.raises(PrlError, match=file.rpartition("/")[2]) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", TURNED)
def test_what_can_be_done_without_is_left_out(tmp_path, how):
    put(tmp_path / "result.json", TURNED[how])
    assert read_result(tmp_path) is None
    put(tmp_path / "rollouts.jsonl", TURNED[how])
    assert read_records([tmp_path / "rollouts.jsonl"])[0] == []


def test_the_trainers_state_is_named(tmp_path):
    put(tmp_path / "state" / "trainer.json", json.dumps({"optimizer": "abc"}).encode().replace(b"abc", b"\xe1bc"))
    with pytest.raises(PrlError, match=r"trainer\.json is damaged"):
        load_state(tmp_path, SimpleNamespace())
