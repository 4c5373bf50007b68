"""Page through the rollouts of a run.

    python -m prl.viewer <run> [--step N] [--env E] [--eval] [--filtered]

On a terminal through `$PAGER` (less), with colours; into a pipe or a file as plain text.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from prl.errors import ConfigError, PrlError
from prl.rollouts.record import read_records
from prl.terminal import Console
from prl.text import safe, spans
from prl.viewer.render import show

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
    """The directory of the run `name`."""
    tried = [Path(name), OUTPUTS / name]
    for path in tried:
        if (path / "rollouts").is_dir():
            return path
    folder = next((path for path in tried if path.is_dir()), None)
    if folder is None:
        raise ConfigError(f"there is no directory {name}, nor {OUTPUTS / name}. {known()}")
    if (folder / "config.yaml").exists():
        raise PrlError(f"the run in {folder} has no rollouts yet")
    if runs := runs_in(folder):
        raise ConfigError(f"{folder} is not a run but holds several; give one of them: {names(map(str, runs))}")
    raise ConfigError(f"{folder} is not a run: it has no rollouts/. {known()}")


def runs_in(path: Path) -> list[Path]:
    """The runs right under a directory, newest first."""
    found = [rollouts.parent for rollouts in path.glob("*/rollouts") if rollouts.is_dir()]
    return sorted(found, key=lambda run: run.stat().st_mtime, reverse=True)


def known() -> str:
    """What to give as a run: those under `outputs/` and in the sweeps there."""
    runs = sorted(run for folder in [OUTPUTS, *OUTPUTS.glob("*")] for run in runs_in(folder))
    there = f"here are: {names(map(str, runs))}" if runs else f"under {OUTPUTS.resolve()} there is none."
    return f"Give a run directory; {there}"


def find_step(run: Path, args: argparse.Namespace) -> tuple[int, list[Path]]:
    """The step to show and its files."""
    pattern = re.compile(r"eval_(?P<env>.+)_step_(?P<step>\d+)\.jsonl" if args.eval else r"step_(?P<step>\d+)\.jsonl")
    found = [
        (match, path)
        for path in sorted((run / "rollouts").iterdir())
        if (match := pattern.fullmatch(path.name)) and path.is_file()
    ]
    if not found:
        raise PrlError(f"{run} has no rollouts of {'an evaluation' if args.eval else 'a training step'} yet")
    if args.eval and args.env is not None:
        envs = sorted({match["env"] for match, _ in found})
        if args.env not in envs:
            raise ConfigError(f"{run} has no evaluation of env {args.env!r}; it has: {names(envs)}")
        found = [(match, path) for match, path in found if match["env"] == args.env]
    steps = sorted({int(match["step"]) for match, _ in found})
    step = steps[-1] if args.step is None else args.step
    if step not in steps:
        kind = "evaluation at" if args.eval else "rollouts of"
        raise ConfigError(f"{run} has no {kind} step {step}; it has: {spans(steps)}")
    return step, [path for match, path in found if int(match["step"]) == step]


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
