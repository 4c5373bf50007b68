"""The command line of `prl.eval` and `prl.tools.chat`: targets, overrides, and the settings of a target's run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from prl.base.errors import ConfigError
from prl.config.build import overridden
from prl.config.model_reference import is_url
from prl.config.suggestions import override_key
from prl.launch import command
from prl.tools import named
from prl.tools.evaluation.targets import read_run_config, run_of

OF_AN_ENV = ("taskset", "args", "eval_args", "timeout_s", "group_timeout_s")
"""Fields that are taken of an env of a run."""


def start(job: Callable[[], None], arguments: list[str], preset: Sequence[str] = ()) -> None:
    """Run a Hydra job over `conf/eval.yaml` with the arguments of a command line.

    Args:
        job: What Hydra runs.
        arguments: As typed.
        preset: The command's own overrides; one gives way to what is typed for its key.
    """
    typed = {override_key(argument) for argument in arguments}
    arguments = [*(each for each in preset if override_key(each) not in typed), *arguments]
    with command.errors_as_exit_codes():
        overrides = to_overrides(arguments)
    command.run(job, overrides, "eval")


def to_overrides(arguments: Sequence[str]) -> list[str]:
    """The overrides for Hydra that arguments stand for.

    Arguments that are no `key=value` and no option are targets. The first that is a run, or a checkpoint of one, gives
    its settings as defaults: the seed and renderer, and unless `env=` is given its envs and how it samples evaluations.

    Raises ConfigError where that run's config is none.
    """
    targets = [argument for place, argument in enumerate(arguments) if is_target(arguments, place)]
    overrides = [argument for place, argument in enumerate(arguments) if not is_target(arguments, place)]
    expanded = [f"targets={json.dumps(targets, ensure_ascii=False)}"] if targets else []
    run = next(filter(None, [run_of(named(Path(target).expanduser())) for target in targets]), None)
    return [*expanded, *(from_run(run, overrides) if run is not None else ()), *overrides]


def is_target(arguments: Sequence[str], place: int) -> bool:
    """Return whether an argument names a model. The jobs of a sweep have directories with `=` in their names."""
    argument = arguments[place]
    if argument.startswith(("-", "+", "~")) or (place > 0 and arguments[place - 1].startswith("-")):
        return False  # an option or its value
    return "=" not in argument or is_url(argument) or Path(argument).expanduser().exists()


def from_run(run: Path, overrides: Sequence[str]) -> list[str]:
    """Overrides that choose the settings of a run. What is plain data lies in the option `settings=run`."""
    typed = {override_key(text) for text in overrides}
    config = read_run_config(run)

    try:
        settings: dict[str, Any] = {"seed": config["seed"]}
        renderer = config["renderer"]
        if "env" not in typed:
            settings |= sampling_and_envs(config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run / 'config.yaml'} is not the config of a training run: {error!r}") from error
    ConfigStore.instance().store(group="settings", name="run", node=settings, package="_global_")
    chosen = ["settings=run", *(["env=[]"] if "env" not in typed else [])]
    if "sampling" in settings and "sampling" not in typed:  # its option names a class, which would replace the run's
        chosen.append(f"++sampling._target_={settings['sampling']['_target_']}")
    if "renderer" not in typed:
        chosen += [f"++renderer.{name}={json.dumps(value)}" for name, value in renderer.items()]
    return chosen


def sampling_and_envs(config: dict[str, Any]) -> dict[str, Any]:
    """Return how a run samples its evaluations, and its envs that have held-out tasks."""
    evaluation = config["orchestrator"]["eval"]["sampling"]
    sampling = overridden(config["sampling"], evaluation)
    envs = {}
    for name, env in config["envs"].items():
        if env["eval_args"] is None:
            continue
        own = overridden(env["sampling"], evaluation)
        as_run = {} if "_target_" in own else sampling
        envs[name] = {key: env[key] for key in OF_AN_ENV}
        envs[name]["sampling"] = {key: None if value == as_run.get(key) else value for key, value in own.items()}
        if env["renderer"] is not None:
            envs[name]["renderer"] = env["renderer"]
    if not envs:
        raise ConfigError("the run has no env with held-out tasks (eval_args): choose one with env=…")
    return {"sampling": sampling, "envs": envs}
