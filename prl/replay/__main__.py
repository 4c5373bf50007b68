"""Train a run again from the batches that it kept (`orchestrator.keep_batches=true`).

    python -m prl.replay <run> [--trust]                         the same weights, bit by bit, or the first difference
    python -m prl.replay <run> [group=option …] [key=value …]    where a changed config begins to differ

One process, on the batches as they were: engine and envs are not asked, and what they were told to do is not changed.
It exits with 0 where nothing differs, 1 where something does, 2 where it cannot be replayed.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from prl import command, rerun
from prl.compose import compose, options
from prl.config import suggestions
from prl.config.instantiate import plain
from prl.config.schema import TrainConfig
from prl.config.validate import validate
from prl.errors import ConfigError, PrlError
from prl.launch.children import leave_none
from prl.launch.local import resolve_model, trainer_environment
from prl.launch.specs import trainer_payload
from prl.replay.recorded import READ, Recorded
from prl.text import as_message, safe
from prl.trainer.config import check_aggregation

SAME, DIFFERENT, REFUSED = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    summary, *_, ends = str(__doc__).strip().splitlines()
    parser = argparse.ArgumentParser(prog="prl replay", description=summary, epilog=ends)
    parser.add_argument("run", help="a run directory, or its name under outputs/")
    parser.add_argument(
        "--trust", action="store_true", help="the run names code or secrets, and who made it is trusted"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what is changed, as in prl train")
    args = parser.parse_intermixed_args(argv)
    try:
        return SAME if command_line(args.run, args.overrides, trusted=args.trust) else DIFFERENT
    except (PrlError, OSError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {as_message(str(error))}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return command.INTERRUPTED


def command_line(name: str, overrides: list[str], *, trusted: bool) -> bool:
    """Replay the run `name`, with `overrides` beside its own config. Returns whether nothing differs.

    Raises PrlError where it cannot be replayed.
    """
    path, recorded_overrides = rerun.recorded_run(name, trusted=trusted)
    recorded = Recorded(path.parent, compose(["run.name=replay", *recorded_overrides]))
    return replay(recorded, changed_config(recorded_overrides, overrides) if overrides else None)


def replay(recorded: Recorded, changed: TrainConfig | None = None) -> bool:
    """Train a run again, by its config, and by another beside it; say what is found. Returns whether nothing differs.

    Raises PrlError where it cannot be replayed.
    """
    config = recorded.config
    if changed is not None and not is_read(config, changed):
        return True
    for caveat in recorded.caveats():
        say(f"bitwise the same is not promised: {caveat}")
    last, initial_reference = recorded.check_batches()
    tell_how_far(recorded, last)
    if changed is not None and changed.max_steps < last:
        last = changed.max_steps
        say(f"the changed run would end after step {last}: what follows is not compared")
    payload = payload_of(config, initial_reference)
    environment = trainer_environment(resolve_model(config.model, "cpu"), recorded.threads())
    os.environ.update(environment)  # before torch and transformers are imported, as in the trainer's process
    import torch
    from transformers.utils.logging import disable_progress_bar

    from prl.replay.side import Side
    from prl.replay.train import Beside, train

    disable_progress_bar()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # the order of sums follows it
    own = Side("the run's trainer", payload)
    if changed is None:
        return train(recorded, last, own, None, say)
    other = Side("the changed trainer", payload_of(changed, initial_reference))
    return train(recorded, last, own, Beside(own, other, say), say)


def changed_config(recorded: list[str], overrides: list[str]) -> TrainConfig:
    """The config of a run's overrides and further ones, checked. Raises ConfigError."""
    try:
        config = compose(["run.name=replay", *rerun.without_superseded(recorded, overrides), *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        groups = options()
        known = command.composed(overrides, groups)
        hints = [
            hint
            for argument in overrides
            for hint in suggestions.misspelt_option(argument, groups) or suggestions.misspelt(argument, known, groups)
        ]
        raise ConfigError(next(iter(hints), str(error).partition("\n")[0])) from error
    with warnings.catch_warnings(action="ignore"):  # they are about what a run of it would do
        validate(config)
    for where, loss in [("loss", config.loss), *(config.node_of(env, "loss") for env in config.envs)]:
        check_aggregation(where, plain(loss))
    return config


def is_read(config: TrainConfig, changed: TrainConfig) -> bool:
    """Whether the trainer reads any key in which two configs differ; says which ones it does not.

    Raises ConfigError for a change that one process cannot replay.
    """
    keys = list(changed_keys(plain(config), plain(changed)))
    if "trainer.num_processes" in keys:
        raise ConfigError("trainer.num_processes: a replay is one process on all ranks' batches: leave it as it was")
    if "trainer.threads" in keys:
        raise ConfigError("trainer.threads: a replay has as many as the run's trainer had: leave it as it was")
    unread = [key for key in keys if not READ.match(key)]
    if not keys:
        say("nothing is changed: the run had these values")
    if unread:
        said = "it changes" if len(unread) == 1 else "they change"
        say(f"the trainer does not read {', '.join(unread)}: on the batches as they were {said} nothing")
    return len(keys) > len(unread)


def changed_keys(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """The keys whose values differ between two nested mappings."""
    for key in sorted({*one, *other}, key=str):
        name, left, right = f"{where}{key}", one.get(key), other.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from changed_keys(left, right, f"{name}.")
        elif left != right:
            yield name


def payload_of(config: TrainConfig, initial_reference: bool) -> dict[str, Any]:
    """What the trainer's process would read as its config."""
    model = resolve_model(config.model, "cpu")  # the trainer's weights are float32, whatever the engine's are
    return trainer_payload(config, model, initial_reference=initial_reference)


def tell_how_far(recorded: Recorded, last: int) -> None:
    """Say where the batches end before the run does."""
    reached, steps = max(recorded.metrics, default=0), recorded.config.max_steps
    if last < reached:
        say(f"batches are kept up to step {last}, metrics up to step {reached}: what follows is not replayed")
    elif last < steps:
        say(f"batches are kept up to step {last} of {steps}: the run ended there")


def say(finding: str) -> None:
    """Print what was found, harmless: env names and texts of tokens are not prl's own."""
    print(safe(finding), flush=True)


if __name__ == "__main__":
    leave_none()
    sys.exit(main())
