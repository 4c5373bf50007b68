"""Message types that cross a process boundary, and the transport that carries them.

The messages are imported on first use: their streams follow from the table in `prl.wire.components`, which may be
extended until then, and composing a config needs the table alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prl.wire.messages import STREAM_FILL, MicroBatch, StepBatch, TrainingSample

__all__ = ["STREAM_FILL", "MicroBatch", "StepBatch", "TrainingSample"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("prl.wire.messages"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
