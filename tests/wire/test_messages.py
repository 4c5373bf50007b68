"""Messages survive the wire, and what is absent takes no room on it."""

import msgspec
import pytest

from prl.wire.messages import STREAM_FILL, MicroBatch, StepBatch, TrainingSample


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


def test_the_streams_follow_from_the_table_of_components():
    assert STREAM_FILL == {
        "advantages": 0.0,
        "ref_logprobs": 0.0,
        "rl_weights": 1.0,
        "ce_weights": 0.0,
        "ref_kl_weights": 0.0,
    }
    for message in (sample(), row()):
        assert all(getattr(message, name) is None for name in STREAM_FILL)


def test_a_sample_trains_with_the_loss_of_the_run_unless_it_names_one():
    assert sample().loss == "" and b"loss" not in msgspec.msgpack.encode(sample())
    named = sample(loss="math")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(named), type=TrainingSample).loss == "math"


def test_a_step_batch_carries_its_rows():
    batch = StepBatch(step=3, micro_batches=[row(), row(**EVERYTHING)], truncated=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=StepBatch) == batch


@pytest.mark.parametrize("broken", [{"input_ids": "abc"}, {"mask": [1.5]}, {"logprobs": None}])
def test_a_message_of_the_wrong_type_is_refused(broken):
    plain = msgspec.to_builtins(row()) | broken
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=MicroBatch)
