"""The ranks of a server: its own process is the first, the others are processes that follow its calls.

Rank 0 tells each call to the others, as msgpack in a broadcast, and all of them make it; what it is answered to a
client is rank 0's. A rank that ends has the server end, with its name. What is on disk is not touched then.
"""

import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from prl.config.build import plain
from prl.config.environment import LOOPBACK
from prl.config.gpus import Gpus
from prl.config.hardware import Machine
from prl.config.schema import ModelConfig
from prl.config.threads import share
from prl.config.trainer import RanksConfig, precision_of
from prl.launch.local import LocalLauncher
from prl.launch.plan import TrainerSpec
from prl.tinker.learner import COLLECTIVE, Learner, take
from prl.tinker.wire import RequestError
from prl.trainer import worker
from prl.trainer.model import load_model
from prl.trainer.ranks import meet

END = "end"
"""Call after which there are no more."""
IDLE = timedelta(days=3650)
"""Time that a rank waits for the next call."""


class Calls:
    """The way of calls from rank 0 to the others, which gets no deadline: a server may have nothing to do for days."""

    def __init__(self) -> None:
        self.group = dist.new_group(timeout=IDLE, backend="gloo")

    def send(self, method: str, *arguments: Any) -> None:
        """Tell the others a call."""
        body = encode(method, *arguments)
        self._broadcast(torch.tensor([len(body)]))
        self._broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8))

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for a call. Returns the method's name and the arguments."""
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        return decode(self._broadcast(torch.empty(int(size), dtype=torch.uint8)).numpy().tobytes())

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, 0, self.group)
        return tensor


def encode(method: str, *arguments: Any) -> bytes:
    """Return a call as msgpack: an array of numbers has its dtype and shape beside it."""
    return msgspec.msgpack.encode((method, arguments), enc_hook=_plain_array)


def decode(body: bytes) -> tuple[str, tuple[Any, ...]]:
    """Read a call of `COLLECTIVE`."""
    method, rest = msgspec.msgpack.decode(body, type=tuple[str, msgspec.Raw])
    return method, msgspec.msgpack.decode(rest, type=COLLECTIVE.get(method, tuple[()]), dec_hook=_array)


def _plain_array(value: Any) -> Any:
    array = value.numpy() if isinstance(value, Tensor) else value
    return array.dtype.str, array.shape, array.tobytes()


def _array(kind: type, value: Any) -> Any:
    dtype, shape, content = value
    array = np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
    return torch.from_numpy(array) if kind is Tensor else array


def join(config: Mapping[str, Any], rank: int, meeting: str | None = None) -> tuple[Learner, Calls | None]:
    """Meet the other ranks, and make the learner of this one.

    Args:
        config: the nodes `trainer`, of `RanksConfig`, and `model`.
        rank: this process's.
        meeting: the file by which they find each other; None = as the environment says.

    Returns:
        The learner, and the way of calls where there are several ranks.
    """
    trainer, model = RanksConfig(**config["trainer"]), config["model"]
    device = torch.device(trainer.device)
    take(device)
    if trainer.num_processes > 1 or device.type == "cuda" or precision_of(trainer.dtype, device.type).is_mixed:
        meet(rank, trainer.num_processes, device, {}, meeting)
    calls = Calls() if trainer.num_processes > 1 else None
    longest = model["max_model_len"]
    code = model["trust_remote_code"]
    load = functools.partial(load_model, model["path"], trust_remote_code=code, max_model_len=longest)
    tell = {} if calls is None or rank else {"tell": calls.send}
    return Learner(lambda place: load(device=place), trainer, longest=longest, **tell), calls


def follow(learner: Learner, calls: Calls) -> None:
    """Make the calls that rank 0 makes, until there are no more."""
    while True:
        method, arguments = calls.receive()
        if method == END:
            return
        with contextlib.suppress(RequestError):  # rank 0 has it too, and answers it
            getattr(learner, method)(*arguments)


def run(config: Mapping[str, Any], folder: Path) -> None:
    """Be one of the ranks behind the first."""
    learner, calls = join(config, int(os.environ["RANK"]))
    assert calls is not None
    follow(learner, calls)


# --- rank 0 ---


def ranks_of(
    trainer: RanksConfig, model: ModelConfig, folder: Path, machine: Machine, gpus: Sequence[Gpus]
) -> TrainerSpec:
    """Return what the ranks are started with.

    Args:
        trainer: How they train.
        model: The base.
        folder: The server's directory.
        machine: Where they compute.
        gpus: The GPUs of each of them.
    """
    device = machine.device_of(trainer.device)
    return TrainerSpec(
        run_dir=folder,
        model=model,
        payload={"model": plain(model), "trainer": plain(trainer) | {"device": "cuda:0" if gpus[0] else device}},
        num_processes=trainer.num_processes,
        device=device,
        threads=share(trainer.threads, model, device, trainer.num_processes, machine.cores),
        gpus=tuple(gpus),
        module=__name__,
        first=1,
    )


def start_others(spec: TrainerSpec, launcher: LocalLauncher) -> None:
    """Start the ranks behind this process, which is the first one."""
    torch.set_num_threads(spec.threads)
    if spec.num_processes > 1:
        os.environ.update(LOOPBACK)  # for gloo, which listens where the host's name points otherwise
        launcher.start_trainer(spec)


def lead(spec: TrainerSpec, launcher: LocalLauncher) -> Learner:
    """Make the learner of this process, which the other ranks follow.

    Raises ValueError for a model that cannot be trained, and PrlError where a rank ends.
    """
    config = spec.payload
    if spec.gpus[0]:  # each of the others sees its own alone, this process those of the engine too
        device = f"cuda:{Machine().gpus.index(spec.gpus[0][0])}"
        config = config | {"trainer": config["trainer"] | {"device": device}}
    if spec.num_processes == 1:
        return join(config, 0)[0]
    made: concurrent.futures.Future[Learner] = concurrent.futures.Future()

    def make() -> None:
        try:
            made.set_result(join(config, 0, str(launcher.meeting))[0])
        except BaseException as error:
            made.set_exception(error)

    # A thread that the end of the process does not wait for: torch's meeting does not hear of a rank that is gone.
    threading.Thread(target=make, daemon=True).start()
    while not made.done():
        launcher.ensure_alive()
        concurrent.futures.wait([made], timeout=0.1)
    return made.result()


if __name__ == "__main__":
    worker.main(run)
