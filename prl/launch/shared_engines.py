"""Engines that outlive a run: the next run of this process that asks for the same one gets it warm."""

import atexit
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from prl.config.build import build, plain
from prl.engines.base import EngineSpec
from prl.launch.launcher import Launcher, TrainerSpec

ENGINES = "engines"
TOKEN = secrets.token_hex(24)
"""What every warm server of this process wants to be shown, so that each run can show it."""

_warm: dict[bytes, tuple[Launcher, str]] = {}
"""The launcher of each server, which has started nothing else, and its address, by what it serves and how."""


class WarmLauncher(Launcher):
    """A run's launcher, but for engines: those are kept for the next run, unless this one ends with an error.

    The runs of a process follow one another, so no two use an engine at once. Each run has the policy's engine load the
    base weights before it begins. The seed of a server is the first run's; every request carries its run's own.
    """

    def __init__(self, node: Any):
        self.node = node
        """The config of the launcher that starts the processes."""
        self.own = build(node, Launcher, "launcher")
        """Starts the trainer."""
        self.used: dict[bytes, Launcher] = {}

    def key(self, spec: EngineSpec) -> bytes:
        """What two engines must have in common to stand for each other."""
        return msgspec.json.encode([plain(self.node), plain(replace(spec, seed=0, log=Path()))], enc_hook=str)

    def start_engine(self, spec: EngineSpec) -> str:
        key = self.key(spec)
        if key not in _warm:
            folder = spec.log.resolve().parents[2] / ENGINES  # beside the run's directory
            launcher = build(self.node, Launcher, "launcher")
            log = folder / f"{spec.process}-{secrets.token_hex(4)}.log"
            _warm[key] = launcher, launcher.start_engine(replace(spec, log=log))
        self.used[key], url = _warm[key]
        return url

    def start_trainer(self, spec: TrainerSpec) -> None:
        self.own.start_trainer(spec)

    def ensure_alive(self) -> None:
        for launcher in (*self.used.values(), self.own):
            launcher.ensure_alive()

    def restart_engine(self, name: str) -> str | None:
        urls = (launcher.restart_engine(name) for launcher in self.used.values())
        return next(filter(None, urls), None)

    async def finish(self, timeout_s: float) -> None:
        await self.own.finish(timeout_s)

    def stop(self) -> None:
        self.own.stop()

    def __exit__(self, *error: object) -> None:
        self.stop()
        if error[0] is not None:  # an engine may be what failed, or be in the middle of something
            for key, launcher in self.used.items():
                launcher.stop()
                _warm.pop(key, None)


@atexit.register
def stop_all() -> None:
    """Stop every warm engine."""
    while _warm:
        _warm.popitem()[1][0].stop()
