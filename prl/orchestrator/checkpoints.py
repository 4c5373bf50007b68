"""Checkpoints as the orchestrator sees them: which steps get one, and its own side of each."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from prl.base import checkpoint_folders as files
from prl.base.files import naming, write_atomically
from prl.config.schema import CheckpointConfig
from prl.curriculum.pools import RETIRED, write_pools
from prl.orchestrator.state import RunState, SyncState, encode
from prl.orchestrator.types import TrainEnv

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two looks for parts that the trainer has written."""


class Checkpoints:
    """Asks the trainer for checkpoints, and completes each once the trainer has written its part.

    The trainer copies its part of step n before it trains on, and writes it meanwhile: one that it was asked for may
    appear after later steps are published. One that it was not asked for is that of its last step.

    Args:
        config: When checkpoints are written, and which are kept.
        run_dir: The run directory.
        envs: Of which the difficulty pools are written beside each checkpoint.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, envs: list[TrainEnv]):
        self.config = config
        self.run_dir = run_dir
        self.envs = envs
        self._asked_at = time.monotonic()
        self._asked: set[int] = set()
        """Steps that the trainer was asked for."""
        self._kept: dict[int, RunState] = {}
        """The orchestrator's state after the batch of a step."""
        self._synced: dict[int, SyncState] = {}
        """The knowledge of `WeightSync` when a step was trained."""
        self._writing = threading.Lock()

    def due(self, step: int) -> bool:
        """Return whether the trainer is to be asked for a checkpoint of `step`, whose batch is about to be shipped."""
        every, minutes = self.config.every, self.config.every_minutes
        late = minutes is not None and time.monotonic() - self._asked_at >= 60 * minutes
        if not late and not (every is not None and step % every == 0):
            return False
        # The minutes count from any checkpoint, also from one that was due by its step.
        self._asked_at = time.monotonic()
        self._asked.add(step)
        return True

    def keep(self, state: RunState) -> None:
        """Take the state of the orchestrator after the batch of a step and before the next one."""
        self._kept[state.step] = state

    def sync(self, step: int, known: Callable[[], SyncState], *, passes: bool) -> None:
        """Take what is known while `step` is the last that is trained, if it gets a checkpoint; else forget it.

        Args:
            step: The last step that has been taken in.
            known: Returns what `WeightSync` knows.
            passes: The trainer has published the next step. The part of `step` may come nevertheless, if it was asked
                for: the trainer writes it while it trains on.
        """
        comes = (passes and step in self._asked) or files.part_path(self.run_dir, step).exists()
        if comes and step not in self._synced:
            self._synced[step] = known()
        if passes and step not in self._synced:
            self._kept.pop(step, None)

    async def run(self) -> None:
        """Complete checkpoints as they come, until it is cancelled."""
        while True:
            for step in self._ready():
                # The pools are read here: a thread would read them while the loop changes them.
                await asyncio.to_thread(self._complete, step, self._pools())
            await asyncio.sleep(POLL_S)

    def finish(self) -> None:
        """Complete the checkpoints whose parts the trainer has written."""
        for step in self._ready():
            self._complete(step, self._pools())
        with self._writing:  # a thread that `run` has begun, and that is not cancelled with it
            pass

    def _ready(self) -> list[int]:
        return [step for step in files.parts_of(self.run_dir) if step in self._kept and step in self._synced]

    def _pools(self) -> dict[str, list[dict[str, Any]]] | None:
        """Return the difficulty pools of all envs, as plain data; None without pools."""
        retired = dict[str, list[dict[str, Any]]]()
        for env in self.envs:
            with env.asking():
                for pool in RETIRED if env.curriculum.pooled else ():
                    retired.setdefault(pool, []).extend(env.curriculum.retired_to(pool))
        return retired or None

    def _complete(self, step: int, pools: dict[str, list[dict[str, Any]]] | None) -> None:
        """Add the orchestrator's side to the trainer's part, and make it a checkpoint."""
        with self._writing:
            folder = files.part_path(self.run_dir, step)
            state = self._kept.pop(step, None)
            synced = self._synced.pop(step, None)
            if state is None or synced is None or not folder.exists():
                return  # another thread has completed it
            with naming(files.checkpoint_path(self.run_dir, step)):
                write_atomically(folder / files.STATE / "run.msgpack", encode(replace(state, sync=synced)))
                if pools is not None:
                    write_pools(folder, pools)
                if (metrics := self.run_dir / "metrics.jsonl").exists():  # the checkpoint says which lines it has
                    files.sync_file(metrics)
                    files.sync_folder(self.run_dir)
                files.finish(self.run_dir, step)
                files.prune(self.run_dir, keep_last=self.config.keep_last, keep_every=self.config.keep_every)
            log.info(
                "checkpoint of step %d, with %d finished groups and %d tasks in flight",
                step,
                len(state.batcher.groups),
                len(state.dispatcher.in_flight),
            )
