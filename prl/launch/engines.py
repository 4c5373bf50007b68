"""The models of a run, made by the classes that its `engine` nodes name."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config.build import class_of
from prl.config.evaluation import EvaluationConfig
from prl.config.schema import ModelConfig, TrainConfig
from prl.engines.base import Connect, Engine, EngineSpec
from prl.errors import PrlError
from prl.launch import specs
from prl.launch.inline import InlineLauncher
from prl.launch.launcher import Launcher

if TYPE_CHECKING:
    from prl.engines.client import PolicyPool


def engine_of(engine: Any, where: str) -> type[Engine]:
    """The class that runs the models of an `engine` node. Raises ConfigError."""
    return class_of(engine, Engine, where)


def start_early(config: TrainConfig, launcher: Launcher, token: str, run_dir: Path) -> list[str]:
    """Start the policy's engines before the run is prepared; none where that has to wait or goes wrong.

    What is wrong is said by `check_engines`, or where they are started later.
    """
    from prl.engines.vllm.engine import VLLMEngine  # another engine may ask the launcher for no server

    served = issubclass(engine_of(config.engine, "engine"), VLLMEngine)
    if not served or config.engine.urls or isinstance(launcher, InlineLauncher):
        return []
    with contextlib.suppress(OSError, PrlError, UnicodeError):
        engines = specs.policy_engines(config, config.model, token, specs.engine_log(run_dir))
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [launcher.start_engine(engine) for engine in engines]
    return []


def policy_pool(
    config: TrainConfig | EvaluationConfig,
    model: ModelConfig,
    launcher: Launcher,
    token: str,
    log: Path,
    urls: Sequence[str] = (),
) -> "PolicyPool":
    """The client of a policy, which is run, or runs already (`engine.urls`, or `urls` of engines started early)."""
    running = [*config.engine.urls, *urls]
    places = specs.placement(config).engines

    def serve(spec: EngineSpec) -> list[str]:
        return running or [launcher.start_engine(each) for each in specs.several(spec, places)]

    spec = specs.policy_engine(config, model, token, log)
    return engine_of(config.engine, "engine").policy(spec, serve)


def hosted_teacher(config: TrainConfig, launcher: Launcher, token: str, log: Path) -> Connect:
    """Run the hosted teacher; returns what makes its clients."""
    teacher = config.teacher
    assert teacher.model is not None  # only a teacher with one is hosted
    places = specs.placement(config).teachers

    def serve(spec: EngineSpec) -> list[str]:
        return [launcher.start_engine(each) for each in specs.several(spec, places)]

    spec = specs.hosted_teacher(config, teacher.model, token, log)
    return engine_of(teacher.engine, "teacher.engine").frozen(spec, serve)
