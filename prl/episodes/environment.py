"""An environment of a run: a verifiers taskset, loaded and checked."""

import contextlib
import importlib
import itertools
import logging
import math
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.env import Env
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, taskset_class

from prl.config.schema import EnvConfig
from prl.episodes.multi_turn import Direct, conversing, count_seats
from prl.episodes.single_turn import Arrived, needs_program, play_group
from prl.episodes.tools import Tools, set_up
from prl.episodes.verifiers_env import make_program, model_context, play_program
from prl.errors import ConfigError, of_own_code
from prl.inference.sampler import Sampler
from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)

MAX_TASKS = 100_000  # of a taskset that never ends


async def _nothing(rollout: Rollout) -> None:
    pass


class Environment:
    """One env of the run: its training tasks, and held-out tasks if it has an evaluation split."""

    seats = 1
    """Rollouts that an episode leaves: one of each agent that is trained. Known once it is served."""
    eval_program: Env | None = None
    """`program` over the held-out taskset, where its agents are in this process: it may be configured otherwise."""
    _held_out: frozenset[int] = frozenset()

    def __init__(self, name: str, config: EnvConfig, *, eval_tasks: int):
        self.name = name
        self.config = config
        self.taskset = load_taskset(config.taskset, config.args, f"envs.{name}.args")
        self.tasks = take_tasks(self.taskset, MAX_TASKS, f"envs.{name}.args")
        self.eval_tasks: list[Task] = []
        held_out: Taskset | None = None
        if config.eval_args is not None and eval_tasks > 0:
            args = {**config.args, **config.eval_args}
            held_out = load_taskset(config.taskset, args, f"envs.{name}.eval_args")
            self.eval_tasks = take_tasks(held_out, eval_tasks, f"envs.{name}.eval_args")
        self._held_out = frozenset(map(id, self.eval_tasks))
        self.program: Env | None = None
        self.context = Direct
        self._played: list[tuple[Env, Tools]] = []
        if reason := needs_program(self.taskset, self.tasks[0]):
            log.info("env %s is played by a program: %s", name, reason)
            self.program, self.context = load_program(config, name, reason), model_context
        else:
            self.tools = tools_of(self.taskset, self.tasks[0], f"envs.{name}.taskset={config.taskset!r}")
            cls = find_env(config.taskset)
            if cls is None and (self.tools.toolsets or self.tasks[0].toolsets(self.tasks[0].config)):
                cls = SingleAgentEnv
            if cls is not None:
                self.program = conversing(cls, self.taskset, self.tools)
                self._played = [(self.program, self.tools)]
            if cls is not None and held_out is not None:
                tools = Tools(held_out.toolsets(held_out.config))
                self.eval_program = conversing(cls, held_out, tools)
                self._played += [(self.eval_program, tools)]

    def check_renderer(self, renderer: Any) -> None:
        """Raise ConfigError where the model is to call tools in a chat format that has none."""
        task = self.tasks[0]
        tools = [*self.taskset.toolsets(self.taskset.config), *task.toolsets(task.config)]
        if tools and not getattr(renderer, "supports_tools", True):
            raise ConfigError(
                f"env {self.name!r} has tools, but the renderer knows no tool calls: choose the model's own with renderer=<family>"
            )

    @contextlib.asynccontextmanager
    async def serving(self):
        """Hold what its episodes need open: tool servers of a program, whatever an env starts for itself."""
        if self.program is None:
            yield
        elif self.context is model_context:
            async with self.program.serving():
                yield
        else:
            self.seats = await count_seats(self.program)
            async with contextlib.AsyncExitStack() as stack:
                for program, tools in self._played:
                    await set_up(tools.toolsets)
                    stack.push_async_callback(program.stop)
                    await program.start()
                yield

    async def play(
        self, task: Task, n: int, sampler: Sampler, *, group_id: int, arrived: Arrived = _nothing
    ) -> list[Rollout]:
        """`n` rollouts of one task, scored, with samples attached. One that failed carries its reason in `error`.

        `arrived` is awaited with each rollout that was graded, as soon as it is.
        """
        timeout_s = min(self.config.timeout_s, self.config.group_timeout_s or math.inf)
        where = {"group_id": group_id, "timeout_s": timeout_s, "arrived": arrived}
        program = self.eval_program if self.eval_program is not None and id(task) in self._held_out else self.program
        if program is not None:
            return await play_program(program, self.context, self.name, task, n, sampler, **where)
        return await play_group(self.name, task, n, sampler, **where)


def tools_of(taskset: Taskset, task: Task, where: str) -> Tools:
    """The taskset's own tools, seen to fit together with those of its task; `where` is for messages."""
    try:
        tools = Tools(taskset.toolsets(taskset.config))
        tools.joined(task.toolsets(task.config)).new_state(task)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    return tools


def load_program(config: EnvConfig, name: str, reason: str) -> Env:
    """verifiers' env for the taskset; it finds tasksets by their id alone."""
    if "." in config.taskset:
        raise ConfigError(
            f"envs.{name}.taskset={config.taskset!r}: {reason}, which takes verifiers' own Env, and that finds a taskset "
            "by a top-level module only: install it as one and give its id"
        )
    try:
        return make_program(config.taskset, config.args)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"envs.{name}.taskset={config.taskset!r}: {error}") from error


def load_taskset(taskset: str, args: dict[str, Any], where: str) -> Taskset:
    """The taskset that `taskset` names, configured with `args`; `where` is their config key, for messages."""
    cls = find_taskset(taskset, where.rsplit(".", 1)[0])
    config_cls = concrete_type(cls, TasksetConfig, origin=Taskset) or TasksetConfig
    try:
        config = config_cls.model_validate({"id": taskset, **args})
        return cls(config)
    except ValidationError as error:
        problem = error.errors()[0]
        known = ", ".join(name for name in config_cls.model_fields if name not in TasksetConfig.model_fields)
        key = ".".join([where, *map(str, problem["loc"])])
        raise ConfigError(f"{key}: {problem['msg']} (settings of {taskset}: {known or 'none'})") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # its constructor is somebody's own code
        raise ConfigError(f"{where}: {cls.__name__} failed: {of_own_code(error)}") from error


def find_taskset(taskset: str, where: str) -> type[Taskset]:
    """The taskset class: from a dotted module path, or from an installed verifiers taskset by its id."""
    if "." not in taskset:
        try:
            return taskset_class(taskset)
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}.taskset={taskset!r}: {error}") from error
        except Exception as error:  # the module is somebody's own code
            raise ConfigError(f"{where}.taskset={taskset!r}: importing it failed: {of_own_code(error)}") from error
    try:
        found = exported(importlib.import_module(taskset), Taskset)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where}.taskset={taskset!r}: {error}; is the package installed?") from error
    except Exception as error:
        raise ConfigError(f"{where}.taskset={taskset!r}: importing it failed: {of_own_code(error)}") from error
    if len(found) != 1:
        raise ConfigError(f"{where}.taskset={taskset!r} must export exactly one Taskset in __all__, has {len(found)}")
    return found[0]


def find_env(taskset: str) -> type[Env] | None:
    """The env class that a taskset's module exports; None where its tasks are a prompt and an answer."""
    if "." not in taskset:
        cls = environment_class(taskset)
        return None if cls is SingleAgentEnv else cls
    return next(iter(exported(importlib.import_module(taskset), Env)), None)


def exported(module: ModuleType, base: type) -> list[type]:
    """The subclasses of `base` in the module's `__all__`."""
    named = [getattr(module, name) for name in getattr(module, "__all__", ())]
    return [cls for cls in named if isinstance(cls, type) and issubclass(cls, base) and cls is not base]


def take_tasks(taskset: Taskset, limit: int, where: str) -> list[Task]:
    """Its first `limit` tasks; at least one."""
    try:
        tasks = list(itertools.islice(iter(taskset), limit))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # its `load` is somebody's own code
        raise ConfigError(f"{where}: loading the tasks failed: {of_own_code(error)}") from error
    if not tasks:
        raise ConfigError(f"{where}: taskset {taskset.config.id!r} has no task with these settings")
    return tasks
