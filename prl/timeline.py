"""Who was at work when, and who waited for whom: a picture of a run, and its shares by process.

    python -m prl.timeline <run> [--steps 10-20]

Writes `timeline.html` into the run directory, of runs that finished, crashed or still run.
"""

import argparse
import sys
from pathlib import Path

from prl.errors import ConfigError
from prl.report.runs import named, read_run
from prl.report.tables import Table, terminal
from prl.report.timeline import over, parsed, rows, write_timeline
from prl.terminal import Console
from prl.text import as_message

WIDTH = 160
"""Of the table in a file or a pipe, characters."""


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 = written; 2 = what the arguments name is not there, or cannot be."""
    summary, *_ = str(__doc__).splitlines()
    parser = argparse.ArgumentParser(prog="prl timeline", description=summary)
    parser.add_argument("run", type=Path, help="a run directory, or its name under outputs/")
    parser.add_argument("--steps", metavar="A-B", help="only these training steps, or one")
    try:
        timeline(parser.parse_args(argv))
    except (ConfigError, OSError) as error:
        print(f"error: {as_message(str(error))}", file=sys.stderr)
        return 2
    return 0


def timeline(args: argparse.Namespace) -> None:
    """Draw, and print the shares. Raises ConfigError for what is not there."""
    folder = named(args.run)
    run, steps = read_run(folder), parsed(args.steps)
    path, found = write_timeline(run, steps)
    for problem in run.problems:
        print(f"warning: {as_message(problem)}", file=sys.stderr)
    if found is not None:
        head = ["process", "busy", "with", "waited for"]
        table = Table(title=found.sentence, head=head, rows=rows(found), numbers=frozenset({"busy"}))
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        console.print(terminal(table))
        console.print(over(found, steps), style="dim", highlight=False, markup=False)
    print(folder / path.name)


if __name__ == "__main__":
    sys.exit(main())
