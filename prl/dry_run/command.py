"""The command: `prl train … dry_run=true`."""

from prl.config.schema import TrainConfig
from prl.errors import ConfigError


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
