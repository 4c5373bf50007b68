"""Engines that outlive a run: the next run of this process that asks for the same one gets it warm."""

import atexit
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from prl.config.build import build, class_of, plain
from prl.config.schema import ModelConfig
from prl.engines.base import EngineSpec
from prl.launch.launcher import Launcher, ProcessDied
from prl.launch.local import LocalLauncher
from prl.launch.plan import RunPlan, TrainerSpec
from prl.weights.base import Weights

ENGINES = "engines"


@dataclass(frozen=True)
class WarmEngine:
    """A server of this process."""

    key: bytes
    """Model and options as JSON: engines with the same stand for each other."""
    launcher: Launcher
    """Has started it and nothing else."""
    url: str

    @property
    def is_alive(self) -> bool:
        try:
            self.launcher.ensure_alive()
        except ProcessDied:
            return False
        return True


_warm: dict[str, WarmEngine] = {}
"""Engines by the name of their process: one for each, since a second one might find neither GPU nor memory free."""


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
        self.used: dict[str, Launcher] = {}

    def check_plan(self, plan: RunPlan) -> None:
        """Check the run, and stop the engines of earlier runs that it does not ask: it may need their memory or GPU.

        Those that have died are stopped as well: `start_engine` takes each one that is left for the one that is asked.
        """
        self.own.check_plan(plan)
        asked = {server.process: self.key(server) for model in plan.models for server in model.servers}
        for name, engine in list(_warm.items()):
            if asked.get(name) != engine.key or not engine.is_alive:
                _warm.pop(name).launcher.stop()

    def key(self, spec: EngineSpec) -> bytes:
        """Return what two engines must have in common to stand for each other."""
        model = spec.model  # but for what the trainer alone reads: its rate, LoRA
        served = ModelConfig(model.path, model.dtype, model.max_model_len, trust_remote_code=model.trust_remote_code)
        return msgspec.json.encode(
            [plain(self.node), plain(replace(spec, model=served, seed=0, log=Path()))], enc_hook=str
        )

    def start_engine(self, spec: EngineSpec) -> str:
        key, name = self.key(spec), spec.process
        if name not in _warm:
            folder = spec.log.resolve().parents[2] / ENGINES  # beside the run's directory
            launcher = build(self.node, Launcher, "launcher")
            url = launcher.start_engine(replace(spec, log=folder / f"{name}-{secrets.token_hex(4)}.log"))
            _warm[name] = WarmEngine(key, launcher, url)
        self.used[name] = _warm[name].launcher
        return _warm[name].url

    def warm_trainer(self, spec: TrainerSpec) -> None:
        self.own.warm_trainer(spec)

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
            for name, launcher in self.used.items():
                launcher.stop()
                _warm.pop(name, None)


def may_keep_engines(launcher: Any, weights: Any) -> bool:
    """Return whether a run can leave its engines to the next one of this process, by the nodes of its config.

    It can if the launcher starts its engines here, and they can load the base weights from a folder.
    """
    # Not a subclass: what it overrides beside the start of engines would not be asked.
    starts_here = class_of(launcher, Launcher, "launcher") is LocalLauncher
    return starts_here and class_of(weights, Weights, "weights").writes_model


def launcher_of(node: Any, *, keeps_engines: bool = False) -> Launcher:
    """The launcher that a node describes; it `keeps_engines` for the next run of this process. Raises ConfigError."""
    return WarmLauncher(node) if keeps_engines else build(node, Launcher, "launcher")


@atexit.register
def stop_all() -> None:
    """Stop every warm engine."""
    while _warm:
        _warm.popitem()[1].launcher.stop()
