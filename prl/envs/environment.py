"""An environment of a run: the taskset by its name, its tasks, and how they are played."""

import contextlib
import importlib.util
import itertools
import logging
import re
import sys
import traceback
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, TypeVar

import verifiers.v1 as vf
from pydantic import ValidationError
from renderers.base import Renderer
from verifiers.v1.utils.generic import concrete_type

from prl.base.errors import ConfigError
from prl.base.user_code import contained, failed
from prl.config.model_reference import POLICY
from prl.config.schema import EnvConfig
from prl.engines.base import Connect
from prl.engines.sampler import Sampler
from prl.envs._verifiers_internals import agents_after_setup
from prl.envs.grading import give_to_workers
from prl.envs.group import Arrived, GroupRequest, nothing_more, play_episodes, play_group
from prl.envs.harness import harness_context, load_harness_env, reason_for_harness, runtime_readers
from prl.envs.isolation import run_all
from prl.envs.models import MODELS, EnvModel, connect_models
from prl.envs.multi_turn import InProcessContext, bind_in_process
from prl.envs.tools import Tools, set_up
from prl.envs.turn import opening_messages, with_kept_pictures
from prl.envs.workers import LocalWorkers, Place, Workers
from prl.rollouts.pictures import PictureStore
from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)

T = TypeVar("T")

V0 = re.compile(
    r"\bload_environment\b|^\s*import verifiers as|^\s*from verifiers(\.(?!v1\b)\w+)* import (?!v1\b)", re.M
)
"""In the source of an environment of verifiers v0, which v1 has no more."""

MAX_TASKS = 100_000
"""Tasks that are taken from a taskset that never ends."""


class Environment:
    """One env of the run: its training tasks, its held-out tasks, and how both are played.

    There are three ways to play, of which the taskset decides:

    - Single-turn tasks: one request for the whole group. `verifiers_env` is None.
    - A multi-turn env, or tools that may be called in this process: verifiers' `Env.run` over agents in this process.
    - What needs verifiers' harness (`uses_harness`): verifiers' own Env, with a program around the model.
    """

    seats = 1
    """Rollouts of an episode: one of each agent that is trained. Known once the env is served."""

    def __init__(
        self,
        name: str,
        config: EnvConfig,
        *,
        eval_tasks: int,
        played: bool = True,
        place: Place | None = None,
        pictures: PictureStore | None = None,
    ):
        """One that is not `played` starts no processes for its graders. Those on Ray are started where `place` says.

        `pictures` keeps those of its tasks; None = the model sees none.
        """
        self.name = name
        self.config = config
        self.pictures = pictures
        self.models: dict[str, EnvModel] = {}
        """Models that its code asks, by role, once they are connected."""
        self.workers: Workers | None = None
        """Processes that its graders run in; None where they run in this one."""
        self._load(eval_tasks)
        if played and self._grades_elsewhere():
            modules = ["prl.envs.grading", type(self.tasks[0]).__module__]
            self.workers = self._start_workers(modules, place)
            tasks = [*self.tasks, *self.eval_tasks]
            give_to_workers(tasks, self.workers, played_by_verifiers=self.uses_harness)

    def _grades_elsewhere(self) -> bool:
        """Return whether its graders run in processes of their own. Those that read a runtime or ask models do not."""
        task, asked, on_ray = self.tasks[0], self.config.in_process, self.config.workers.where == "ray"
        # The clients of these models live in this process.
        if self.config.models:
            return False
        if self.uses_harness and (runtime_readers(task) or task.plugged_judges()):
            if on_ray:
                raise ConfigError(f"envs.{self.name}.workers.where=ray: judges and readers of a runtime run here")
            return False
        return on_ray or not (promises_to_be_quick(self.taskset) if asked is None else asked)

    def _start_workers(self, modules: list[str], place: Place | None) -> Workers:
        """Start the processes of the graders. Raises ConfigError."""
        workers = self.config.workers
        if workers.where == "local":
            return LocalWorkers(self.name, modules, workers.memory_gb, workers.count)
        if place is None:
            raise ConfigError(f"envs.{self.name}.workers.where=ray is for training: choose where=local")
        from prl.envs.ray_workers import RayWorkers

        return RayWorkers(self.name, modules, workers.memory_gb, workers.count, place)

    def _load(self, eval_tasks: int) -> None:
        """Load the tasks, and find how they are played."""
        name, config = self.name, self.config
        where = f"envs.{name}"
        self.taskset = load_taskset(config.taskset, config.args, f"{where}.args")
        self.tasks = take_tasks(self.taskset, MAX_TASKS, f"{where}.args", pictures=self.pictures)
        self.eval_tasks: list[vf.Task] = []
        self.verifiers_env: vf.Env | None = None
        """Plays the training tasks; None where they are single turns."""
        self.eval_verifiers_env: vf.Env | None = None
        """Plays the held-out tasks: an in-process env reads the settings of the taskset that it is bound to."""
        self._in_process: list[tuple[vf.Env, Tools]] = []
        exports = [*_exported(config.taskset, vf.Env), *_exported(config.taskset, vf.Harness)]
        with contained(f"{where}.taskset={config.taskset!r}", "reading its hooks"):
            reason = reason_for_harness(self.taskset, self.tasks[0], exports)
        self.uses_harness = reason is not None
        if reason is not None:
            log.info("env %s is played by verifiers' harness: %s", name, reason)
            self.verifiers_env = self.eval_verifiers_env = load_harness_env(config.taskset, config.args, where, reason)
        else:
            self.verifiers_env = self._bind_in_process(self.taskset)
        if config.eval_args is not None and eval_tasks > 0:
            held_out = load_taskset(config.taskset, {**config.args, **config.eval_args}, f"{where}.eval_args")
            nothing_graded = all(map(reason_ungraded, self.tasks))
            self.eval_tasks = take_tasks(
                held_out, eval_tasks, f"{where}.eval_args", least=not nothing_graded, pictures=self.pictures
            )
            if not self.eval_tasks:
                log.info("env %s is not evaluated: %s", name, reason_ungraded(self.tasks[0]))
            if not self.uses_harness:
                self.eval_verifiers_env = self._bind_in_process(held_out)

    @property
    def tools(self) -> Tools:
        """Return what the model may call in this process."""
        return self._in_process[0][1] if self._in_process else Tools()

    def _bind_in_process(self, taskset: vf.Taskset) -> vf.Env | None:
        """Create the env over agents in this process; None if the tasks are single turns."""
        try:
            task, tools = self.tasks[0], Tools(taskset.toolsets(taskset.config))
            all_tools = tools.joined(task.toolsets(task.config))
            all_tools.new_state(task)
        except ValueError as error:
            raise ConfigError(f"envs.{self.name}.taskset={self.config.taskset!r}: {error}") from error
        cls = next(iter(_exported(self.config.taskset, vf.Env)), vf.SingleAgentEnv if all_tools.toolsets else None)
        if cls is None:
            return None
        env = bind_in_process(cls, taskset, tools)
        self._in_process.append((env, tools))
        return env

    def check_renderer(self, renderer: Renderer) -> None:
        """Raise ConfigError if the model is to call tools in a chat format that has none."""
        task = self.tasks[0]
        tools = [*self.taskset.toolsets(self.taskset.config), *task.toolsets(task.config)]
        if tools and not getattr(renderer, "supports_tools", True):
            raise ConfigError(
                f"env {self.name!r} has tools, but the renderer does not support tool calls: "
                "choose the model's own with renderer=<family>"
            )

    def connect(self, policy: Sampler, clients: Connect) -> None:
        """Give the tasks clients of the env's `models`; those of frozen models that it has are kept.

        Args:
            policy: Asks the live policy.
            clients: Makes clients of frozen models.
        """
        references = self.config.references.items()
        new = {role: value for role, value in references if value == POLICY or role not in self.models}
        self.models |= connect_models(new, policy, clients)
        for task in (*self.tasks, *self.eval_tasks):
            vars(task)[MODELS] = self.models

    async def wait_for_models(self) -> None:
        """Wait until the frozen models of the env answer. Raises DeadlinePassed, naming the one that does not."""
        await run_all(model.wait_ready() for model in self.models.values())

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[None, None]:
        """Hold open what episodes need: the servers of verifiers' harness, or what an in-process env starts."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(lambda: run_all(model.close() for model in self.models.values()))
            await self.wait_for_models()
            if self.workers is not None:
                await stack.enter_async_context(self.workers.serving())
            if self.uses_harness and self.verifiers_env is not None:
                await stack.enter_async_context(self.verifiers_env.serving())
            elif self.verifiers_env is not None:
                agents = await agents_after_setup(self.verifiers_env, InProcessContext(None, ""))
                # An env may decide in its setup which agents are trained.
                self.seats = sum(agent.trainable for agent in agents)
            for env, tools in self._in_process:
                await set_up(tools.toolsets)
                # Before `start`, which may fail half-way.
                stack.push_async_callback(env.stop)
                await env.start()
            yield

    async def play(
        self,
        task: vf.Task,
        n: int,
        sampler: Sampler,
        *,
        group_id: int,
        held_out: bool = False,
        arrived: Arrived = nothing_more,
    ) -> list[Rollout]:
        """Play `n` attempts at one task. Returns the rollouts, in the order of the attempts.

        Each is graded, with its samples attached, or has failed (`rollout.error`).

        Args:
            task: One of `tasks`, or of `eval_tasks` with `held_out`.
            n: Number of attempts; each leaves `seats` rollouts.
            sampler: The model that plays.
            group_id: Names the group among those of the env; its seeds depend on it.
            held_out: The task is one of `eval_tasks`.
            arrived: Awaited with each rollout as soon as it is finished, while others are still played. The time that
                it takes does not count towards a rollout's deadline.
        """
        limit: int | None = getattr(self.taskset, "MAX_TOKENS", None)
        request = GroupRequest(
            env_name=self.name,
            task=task,
            n=n,
            sampler=sampler if limit is None else sampler.limited(limit),
            group_id=group_id,
            timeout_s=min(self.config.timeout_s, self.config.group_timeout_s or self.config.timeout_s),
            arrived=arrived,
        )
        env = self.eval_verifiers_env if held_out else self.verifiers_env
        if env is None:
            return await play_group(request)
        return await play_episodes(env, harness_context if self.uses_harness else InProcessContext, request)


def promises_to_be_quick(taskset: vf.Taskset) -> bool:
    """Return whether the taskset says that its code may run in this process: `IN_PROCESS`, in its own module.

    Who extends a taskset of another module's makes promises of their own.
    """
    says = next((cls for cls in type(taskset).__mro__ if "IN_PROCESS" in vars(cls)), None)
    return says is not None and says.__module__ == type(taskset).__module__ and bool(taskset.IN_PROCESS)


def load_taskset(taskset: str, args: dict[str, Any], where: str) -> vf.Taskset:
    """Load a taskset.

    Args:
        taskset: A dotted module path, or the id of an installed verifiers taskset.
        args: Its settings.
        where: Config key of `args`, for messages: `envs.math.args`.

    Raises:
        ConfigError: It cannot be found or imported, or does not accept the settings.
    """
    cls = find_taskset(taskset, where.rsplit(".", 1)[0])
    config_cls = concrete_type(cls, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    try:
        return cls(config_cls.model_validate({"id": taskset, **args}))
    except ValidationError as error:
        problem = error.errors()[0]
        known = ", ".join(name for name in config_cls.model_fields if name not in vf.TasksetConfig.model_fields)
        key = ".".join([where, *map(str, problem["loc"])])
        raise ConfigError(f"{key}: {problem['msg']} (settings of {taskset}: {known or 'none'})") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    except BaseException as error:  # the constructor is user code
        raise failed(error, where, cls.__name__) from error


def find_taskset(taskset: str, where: str) -> type[vf.Taskset]:
    """Return the taskset class of a dotted module path or an installed id; `where` is the env's config key."""
    key, exported = f"{where}.taskset={taskset!r}", []
    failure: BaseException | None = None
    try:
        exported = _exported(taskset, vf.Taskset)
    except ModuleNotFoundError as error:
        first = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error  # verifiers has its own
        if f"{_module_of(taskset)}.".startswith(f"{first.name}."):
            hint = "; is the package installed?" if "." in taskset else ""  # verifiers gives a hint of its own
            raise ConfigError(f"{key}: {error}{hint}") from error
        failure = first
    except BaseException as error:  # the module is user code
        failure = error
    if len(exported) == 1:
        return exported[0]
    if _is_v0(taskset, failure):
        raise ConfigError(
            f"{key} is an environment of verifiers v0 (load_environment, SingleTurnEnv, Rubric), and prl plays those "
            "of v1: take a later release of its package, or make its data and rewards a Taskset (prl/EXTENDING.md, Env)"
        )
    if failure is not None:
        raise failed(failure, key, "importing it") from failure
    raise ConfigError(f"{key} must export exactly one Taskset in __all__, has {len(exported)}")


def _module_of(taskset: str) -> str:
    """Return the module of a dotted path or an installed id, which may be a hub's `owner/name@version`."""
    return taskset if "." in taskset else taskset.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def _is_v0(taskset: str, failure: BaseException | None) -> bool:
    """Return whether a taskset's module, or the file whose import has failed, is written for verifiers v0."""
    name, files = _module_of(taskset), []
    if failure is not None:
        files.append(traceback.extract_tb(failure.__traceback__)[-1].filename)
    with contextlib.suppress(Exception):  # of a package above it, which is user code
        spec = importlib.util.find_spec(name)
        files.append(str(spec and spec.origin))
    sources = [Path(file).read_text(encoding="utf-8", errors="replace") for file in files if Path(file).is_file()]
    if any("verifiers.v1" in source for source in sources):
        return False
    return hasattr(sys.modules.get(name), "load_environment") or any(map(V0.search, sources))


def _exported(taskset: str, base: type[T]) -> list[type[T]]:
    """Return the subclasses of `base` in `__all__` of a taskset's module."""
    module = importlib.import_module(taskset) if "." in taskset else vf.import_taskset(taskset)
    exports = [getattr(module, name) for name in getattr(module, "__all__", ())]
    return [cls for cls in exports if isinstance(cls, type) and issubclass(cls, base) and cls is not base]


def reason_ungraded(task: vf.Task) -> str | None:
    """Return why no reply to a task can be graded, which a task of prl's own may say; None if one can."""
    return getattr(task, "ungraded", None)


def take_tasks(
    taskset: vf.Taskset, limit: int, where: str, least: int = 1, pictures: PictureStore | None = None
) -> list[vf.Task]:
    """Return the first `limit` tasks, at least `least`; `where` is the config key of the taskset's settings.

    `pictures` keeps those of the tasks, in whose messages references take their place.
    """
    try:
        loaded, tasks = iter(taskset), []
        for task in itertools.islice(loaded, limit):
            kept = with_kept_pictures(task, pictures)
            opening_messages(kept.data)  # one with a sound is refused at once
            tasks.append(kept)
        if limit == MAX_TASKS and next(loaded, None) is not None:
            log.warning("%s: the first %s tasks are taken, and there are more", where, f"{limit:,}")
    except (ValueError, OSError) as error:
        raise ConfigError(f"{where}: {error}") from error
    except BaseException as error:  # `load` is user code
        raise failed(error, where, f"loading the tasks of {type(taskset).__name__}") from error
    if len(tasks) < least:
        raise ConfigError(f"{where}: taskset {taskset.config.id!r} has no task with these settings")
    return tasks
