"""The trainer and the workers of engines as peers, of which the trainer sends tensors to the others.

What carries them follows from where the peers are, which they find out as they meet (`meeting.py`): memory that all of
them have (`shared_memory.py`), else a process group (`process_group.py`).
"""

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.errors import PrlError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from prl.wire.buckets import Place

POLL_S = 0.0002
LOOK_S = 0.05
"""Time between two looks at whether a transfer has been called off, seconds."""


class TransferFailed(PrlError):
    """Weights did not pass, or not all of them: a peer is gone, called it off, or did not come in time."""


def called_off(store: str) -> Path:
    """The file whose presence calls off what the peers that meet at `store` do."""
    return Path(f"{store}.off")


class Wait:
    """A wait with its deadline, which ends as well where the transfer is called off."""

    def __init__(self, store: str, timeout_s: float, what: str):
        self.off, self.timeout_s, self.what = str(called_off(store)), timeout_s, what
        self.began = self.looked = time.monotonic()

    def pause(self, missing: str) -> None:
        """Sleep for a moment. Raises as `look`."""
        self.look(missing)
        time.sleep(POLL_S)

    def look(self, missing: str) -> None:
        """Raise TransferFailed at the deadline, naming what is `missing`, or where the transfer has been called off."""
        now = time.monotonic()
        if now - self.began > self.timeout_s:
            raise TransferFailed(f"waited {self.timeout_s:g} s {self.what}: {missing}")
        if now - self.looked > LOOK_S:
            self.looked = now
            self.look_off()

    def look_off(self) -> None:
        """Raise TransferFailed where the transfer has been called off."""
        if os.path.exists(self.off):
            raise TransferFailed("the transfer was called off: another peer had failed")


class Peers(ABC):
    """This process among its peers, of which peer 0 sends. Every wait has a deadline, and can be called off."""

    def __init__(self, store: str, *, device: "torch.device", timeout_s: float):
        """Where they have met, where this peer's tensors are, and the deadline for each bucket to pass, seconds."""
        self.store, self.device, self.timeout_s = store, device, timeout_s

    @abstractmethod
    def buffers(self, cut: "Sequence[Sequence[Place]]") -> "list[torch.Tensor]":
        """Memory for the buckets of a transfer: two tensors of bytes, used in turn. Raises TransferFailed."""

    @abstractmethod
    def broadcast(self, packed: "torch.Tensor") -> Any:
        """Begin to send the next bucket, or to receive it, in its buffer; `wait` for what this returns."""

    @abstractmethod
    def wait(self, work: Any) -> None:
        """Return when a bucket is here, or, on the sender, when its buffer is free again. Raises TransferFailed."""

    @abstractmethod
    def let_go(self, work: Any) -> None:
        """Say that a bucket that was received has been loaded: its buffer may be filled. Raises TransferFailed."""

    @abstractmethod
    def close(self) -> None:
        """Leave them. Returns at once."""
