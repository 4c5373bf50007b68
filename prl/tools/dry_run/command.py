"""The command: `prl train … dry_run=true`."""

import sys

from prl.config.schema import TrainConfig
from prl.errors import ConfigError
from prl.monitors.terminal import Console

WIDTH = 160
"""Of a table in a file or a pipe, characters."""


def dry_run(config: TrainConfig) -> None:
    """Print what a run of `config`, which is prepared, would take on the machine that is assumed.

    Starts no process, loads no weights and writes nothing. Raises ConfigError for what the machine has no room for,
    naming what to change; the table is printed before that.
    """
    from prl.tools.dry_run.plan import plan  # torch and transformers, once the config has passed

    planned = plan(config)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(planned.table())
    for name, (tokens, longest) in planned.caches.items():
        print(f"KV cache of {name}: {tokens:,} tokens, {tokens / longest:,.1f} sequences of {longest:,}")
    for problem in planned.problems():
        raise ConfigError(problem)
    print("fits")
