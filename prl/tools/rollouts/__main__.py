"""Page through the rollouts of a run.

    python -m prl.tools.rollouts <run> [--step N] [--env E] [--eval]

On a terminal through `$PAGER` (less); into a pipe or a file as it is.
"""

import argparse
import os
import pydoc
import re
import signal
import sys
from pathlib import Path

from prl.base.errors import ConfigError, PrlError
from prl.base.files import lines_of
from prl.rollouts.record_lines import Record
from prl.tools import OUTPUTS, named, run_command
from prl.tools.rollouts.render import step_text


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="prl rollouts",
        description="Page through the rollouts of a run: the messages, the reward, and the outcome of each.",
    )
    parser.add_argument("run", help="a run directory, or its name under outputs/")
    parser.add_argument("--step", type=int, metavar="N", help="the step; by default the last there is")
    parser.add_argument("--env", metavar="E", help="only rollouts of this env")
    parser.add_argument("--eval", action="store_true", help="the evaluation's rollouts instead of those of training")
    return run_command(page, parser, argv)


def page(args: argparse.Namespace) -> None:
    """Show what the arguments ask for, on a terminal through a pager.

    Raises:
        ConfigError: They name something that does not exist.
        PrlError: There is nothing to show.
    """
    run = named(Path(args.run))
    if not (run / "rollouts").is_dir():
        raise ConfigError(f"there is no run with rollouts at {args.run} or {OUTPUTS / args.run}")
    step, paths = find_step(run, args)
    notes: list[str] = []
    records = [record for path in paths for record in lines_of(path, Record, notes)]
    if not records:
        raise PrlError("\n".join(notes) or f"{run} has no rollouts of step {step}")
    if args.env is not None:
        there = ", ".join(sorted({record.env for record in records}))
        records = [record for record in records if record.env == args.env]
        if not records:
            raise ConfigError(f"step {step} of {run} has no rollouts of env {args.env!r}; it has: {there}")
    title = f"{run} · {'evaluation at ' if args.eval else ''}step {step}"
    os.environ.setdefault("LESS", "FX")  # F for no paging of what fits the screen
    pydoc.pager(step_text(title, records, notes))


def find_step(run: Path, args: argparse.Namespace) -> tuple[int, list[Path]]:
    """The step to show and its files."""
    pattern = re.compile(r"eval_(?P<env>.+)_step_(?P<step>\d+)\.jsonl" if args.eval else r"step_(?P<step>\d+)\.jsonl")
    files: dict[int, list[Path]] = {}
    for path in sorted((run / "rollouts").iterdir()):
        match = pattern.fullmatch(path.name)
        if match and not (args.eval and args.env and match["env"] != args.env):
            files.setdefault(int(match["step"]), []).append(path)
    kind = f"evaluation{f' of env {args.env!r}' if args.env else ''}" if args.eval else "training step"
    if not files:
        raise PrlError(f"{run} has rollouts of no {kind} yet")
    step = max(files) if args.step is None else args.step
    if step not in files:
        raise ConfigError(f"{run} has no {kind} {step}; it has {len(files)}, from {min(files)} to {max(files)}")
    return step, files[step]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends any program that prints
    sys.exit(main())
