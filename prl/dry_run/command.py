"""The command: `prl train … dry_run=true`."""

from dataclasses import replace

from prl.config.hardware import MachineConfig
from prl.config.schema import TrainConfig
from prl.errors import ConfigError
from prl.launch.launcher import Launcher
from prl.launch.nodes import NodesLauncher


def dry_run(config: TrainConfig) -> None:
    """Print what a run of `config`, which is prepared, would start and take on the machine that is assumed.

    Starts no process, loads no weights and writes nothing. Raises ConfigError for what the machine has no room for,
    naming the setting to change; the tables are printed before that.
    """
    from prl.dry_run import advice, page, plan  # torch and transformers, once the config has passed

    sizes = plan.Sizes.of(config)
    found = plan.plan(config, sizes)
    page.show(config, sizes, found)
    if problems := list(found.problems()):
        raise ConfigError(f"{problems[0]}: {advice.advice(config, sizes)}")
    print("fits")


def machine_of(config: TrainConfig, launcher: Launcher) -> MachineConfig:
    """What is to be taken for the machine's: what `machine` says and, of the rest, what a node of the launcher has."""
    if not isinstance(launcher, NodesLauncher):
        return config.machine
    if config.machine.gpus not in (None, launcher.gpus_per_node):
        raise ConfigError(
            f"machine.gpus={config.machine.gpus} and launcher.gpus_per_node={launcher.gpus_per_node} are both about a "
            "node: leave machine.gpus out"
        )
    given = {name: value for name, value in vars(config.machine).items() if value is not None}
    return replace(launcher.machine(), **given)
