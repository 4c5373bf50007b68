"""Messages survive the wire, and what is absent takes no room on it."""

import msgspec
import pytest

from prl.wire.messages import STREAM_FILL, MicroBatch, TrainingSample


def sample(**streams) -> TrainingSample:
    return TrainingSample(
        token_ids=[5, 151_643, 7],
        mask=[False, True, True],
        logprobs=[0.0, -0.1, -1e-7],
        temperatures=[1.0, 0.7, 0.7],
        env_name="math",
        reward=0.1,
        **streams,
    )


def row(**streams) -> MicroBatch:
    return MicroBatch(
        input_ids=[5, 6, 0],
        mask=[False, True, False],
        logprobs=[0.0, -2.5, 0.0],
        temperatures=[1.0] * 3,
        position_ids=[0, 1, 0],
        sequence_lengths=[2],
        env_names=["math"],
        losses=[""],
        **streams,
    )


EVERYTHING = {name: [0.0, 0.25, -1.0] for name in STREAM_FILL}


@pytest.mark.parametrize("streams", [{}, {"advantages": [0.0, 0.1, -3.3]}, EVERYTHING], ids=len)
@pytest.mark.parametrize("make", [sample, row])
def test_a_round_trip_changes_nothing(make, streams):
    message = make(**streams)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


@pytest.mark.parametrize("make", [sample, row])
def test_absent_streams_are_absent_in_the_bytes(make):
    bare = msgspec.msgpack.encode(make())
    assert not [name for name in STREAM_FILL if name.encode() in bare]
    for name in STREAM_FILL:
        one = msgspec.msgpack.encode(make(**{name: [0.0, 0.0, 0.0]}))
        assert [other for other in STREAM_FILL if other.encode() in one] == [name], "zeros are not absence"


@pytest.mark.parametrize("broken", [{"input_ids": "abc"}, {"mask": [1.5]}, {"logprobs": None}])
def test_a_message_of_the_wrong_type_is_refused(broken):
    plain = msgspec.to_builtins(row()) | broken
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=MicroBatch)
