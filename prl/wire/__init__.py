"""Message types that cross a process boundary, and the files that carry them."""

from prl.wire.messages import STREAM_FILL, MicroBatch, StepBatch, TrainingSample

__all__ = ["STREAM_FILL", "MicroBatch", "StepBatch", "TrainingSample"]
