"""The table of loss components, and the classes that have a field for each."""

from dataclasses import fields

import msgspec
import pytest

from prl.losses import LossCounts
from prl.rollouts.components import COMPONENTS, STREAM_FILL
from prl.rollouts.messages import MicroBatch, TrainingSample


def sample(**fields):
    defaults = {
        "token_ids": [1, 2, 3, 4],
        "mask": [False, True, True, False],
        "logprobs": [0.0] * 4,
        "temperatures": [1.0] * 4,
        "env_name": "toy",
        "reward": 0.0,
    }
    return TrainingSample(**defaults | fields)


@pytest.mark.parametrize(
    ("fields", "rl", "ce", "ref_kl"),
    [
        ({}, [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ({"rl_weights": [1.0, 0.0, 0.5, 1.0]}, [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ({"ce_weights": [0.1, 0.0, 1.0, 0.0]}, [0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]),
        ({"rl_weights": [0.0] * 4, "ref_kl_weights": [0.0, 1.0, 0.0, -1.0]}, [0] * 4, [0] * 4, [0, 1, 0, 1]),
    ],
)
def test_members_of_a_sample(fields, rl, ce, ref_kl):
    found = sample(**fields)
    assert [found.members(COMPONENTS[name]) for name in ("rl", "ce", "ref_kl")] == [rl, ce, ref_kl]
    for name, members in (("rl", rl), ("ce", ce), ("ref_kl", ref_kl)):
        assert found.feeds(COMPONENTS[name]) == any(members)
        assert [found.feeds(COMPONENTS[name], n) for n in range(5)] == [any(members[:n]) for n in range(5)]


def test_absent_streams_are_absent_in_the_bytes():
    """Zeros are not absence."""
    for name in STREAM_FILL:
        data = msgspec.msgpack.encode(sample(**{name: [0.0] * 4}))
        assert [other for other in STREAM_FILL if other.encode() in data] == [name]


def test_every_component_has_its_fields():
    """In the messages, of its streams; in what its loss is divided by, of its count, in the table's order."""
    for message in (TrainingSample, MicroBatch):
        assert set(STREAM_FILL) <= set(message.__struct_fields__)
    assert [field.name for field in fields(LossCounts)][: len(COMPONENTS)] == list(COMPONENTS)
