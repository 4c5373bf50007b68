"""Page through the rollouts of a run.

    python -m prl.tools.rollouts <run> [--step N] [--env E] [--eval] [--filtered]

On a terminal through `$PAGER` (less), with colours; into a pipe or a file as plain text.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from prl.errors import ConfigError, PrlError
from prl.monitors.terminal import Console
from prl.monitors.text import safe, spans
from prl.rollouts.record import read_records
from prl.tools.rollouts.render import show

OUTPUTS = Path("outputs")
LISTED = 20  # names in an error


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status.

    0 = shown; 1 = nothing to show; 2 = the arguments name something that does not exist or cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="prl rollouts",
        description="Page through the rollouts of a run: the messages, the reward, and the outcome of each.",
        epilog="The table at the top covers the whole step, or its rollouts of --env.",
    )
    parser.add_argument("run", help="a run directory, or its name under outputs/")
    parser.add_argument("--step", type=int, metavar="N", help="the step; by default the last there is")
    parser.add_argument("--env", metavar="E", help="only rollouts of this env")
    parser.add_argument("--eval", action="store_true", help="the evaluation's rollouts instead of those of training")
    parser.add_argument(
        "--filtered",
        action="store_true",
        help="only rollouts that a filter of either slot matched, monitoring filters included; rollouts that did not "
        "train for another reason (failed, surplus, difficulty) are left out",
    )
    try:
        page(parser.parse_args(argv))
    except (PrlError, OSError) as error:
        message = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"error: {safe(message)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | OSError) else 1
    return 0


def page(args: argparse.Namespace) -> None:
    """Show what the arguments ask for.

    Raises:
        ConfigError: They name something that does not exist.
        PrlError: There is nothing to show.
    """
    run = find_run(args.run)
    step, paths = find_step(run, args)
    records, notes = read_records(paths)
    if not records:
        raise PrlError("\n".join(notes) or f"no rollouts in {names(str(path) for path in paths)}")
    if args.env is not None:
        there = names(sorted({record.env for record in records}))
        records = [record for record in records if record.env == args.env]
        if not records:
            raise ConfigError(f"step {step} of {run} has no rollouts of env {args.env!r}; it has: {there}")
    shown = [record for record in records if record.matched] if args.filtered else records
    if args.filtered:
        notes.append(f"Shown: {len(shown)} of {len(records)} rollouts, those that a filter matched.")
    title = f"{run} · {'evaluation at ' if args.eval else ''}step {step}"
    deliver(lambda console: show(console, title, records, shown, notes, args.eval))


def find_run(name: str) -> Path:
    """The directory of the run `name`. Raises ConfigError, with the runs that there are, where it is not one."""
    tried = [Path(name), OUTPUTS / name]
    for path in tried:
        if (path / "rollouts").is_dir():
            return path
    folders = [*tried, OUTPUTS, *OUTPUTS.glob("*")]
    runs = sorted(str(path.parent) for folder in folders for path in folder.glob("*/rollouts"))
    there = f"here are: {names(dict.fromkeys(runs))}" if runs else f"under {OUTPUTS.resolve()} there is none"
    raise ConfigError(f"there is no run with rollouts at {name} or {OUTPUTS / name}. Give a run directory; {there}")


def find_step(run: Path, args: argparse.Namespace) -> tuple[int, list[Path]]:
    """The step to show and its files."""
    pattern = re.compile(r"eval_(?P<env>.+)_step_(?P<step>\d+)\.jsonl" if args.eval else r"step_(?P<step>\d+)\.jsonl")
    matches = [(pattern.fullmatch(path.name), path) for path in sorted((run / "rollouts").iterdir())]
    files = [
        (int(match["step"]), path)
        for match, path in matches
        if match and not (args.eval and args.env is not None and match["env"] != args.env)
    ]
    kind = f"evaluation{f' of env {args.env!r}' if args.env else ''}" if args.eval else "training step"
    if not files:
        raise PrlError(f"{run} has rollouts of no {kind} yet")
    steps = sorted({step for step, _ in files})
    step = steps[-1] if args.step is None else args.step
    if step not in steps:
        raise ConfigError(
            f"{run} has no {'evaluation at' if args.eval else 'rollouts of'} step {step}; it has: {spans(steps)}"
        )
    return step, [path for number, path in files if number == step]


def names(items: Iterable[str]) -> str:
    items = list(items)
    more = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return ", ".join(items[:LISTED]) + more


class Output(Console):
    """A rich console that raises BrokenPipeError when the reader has gone, instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def deliver(print_on: Callable[[Console], None]) -> None:
    """Print through a pager if stdout is a terminal, else as plain text. Stops silently when the reader goes away."""
    console = Output()
    try:
        if sys.stdout.isatty():
            os.environ.setdefault("LESS", "FRX")  # as git does: R for colours, F for no paging of what fits the screen
            with console.pager(styles=True):
                print_on(console)
        else:
            print_on(console)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more, and would complain


if __name__ == "__main__":
    sys.exit(main())
