"""Pages and tables of what runs left in their directories.

    python -m prl.tools.report <run>                                 one run: report.html, trace.json, busy shares
    python -m prl.tools.report <sweep> [--metric M] [--threshold X]  its runs added up: summary.md and the like
    python -m prl.tools.report <run> <run> <sweep> … --out <folder>  runs of several places

It takes runs that finished, crashed, were refused or still run.
"""

import argparse
import signal
import sys
from pathlib import Path

from rich.markdown import Markdown

from prl.base.errors import ConfigError
from prl.base.terminal import Console
from prl.runs.run_dir import holds_run
from prl.tools import named, run_command

WIDTH = 200
"""Characters of a line of the tables in a file or a pipe."""


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    summary, *_ = str(__doc__).splitlines()
    parser = argparse.ArgumentParser(prog="prl report", description=summary)
    parser.add_argument(
        "dirs",
        nargs="+",
        type=Path,
        metavar="dir",
        help="a run directory, or a folder of some; or its name under outputs/",
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="M",
        help="a metric, or a pattern with *; may be repeated. By default the held-out rewards and the sampled one",
    )
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="count steps, tokens and seconds until the metric is at least this"
    )
    parser.add_argument("--out", type=Path, metavar="folder", help="where to write to; by default the folder named")
    return run_command(report, parser, argv)


def report(args: argparse.Namespace) -> None:
    """Write what the arguments ask for, and say where. Raises ConfigError for what is not there."""
    dirs = [named(path) for path in args.dirs]
    missing = [str(folder) for folder in dirs if not folder.is_dir()]
    if missing:
        raise ConfigError(f"there is no folder {', '.join(missing)}")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if len(dirs) == 1 and holds_run(dirs[0]):
        if args.metric or args.threshold is not None or args.out is not None:
            raise ConfigError(f"{dirs[0]} is one run: its page takes no --metric, --threshold or --out")
        from prl.tools.report.page import write_page
        from prl.tools.report.timeline import write_timeline

        page = write_page(dirs[0])
        write_timeline(dirs[0], console)
        print(page)
        return
    if args.out is None and len(dirs) > 1:
        raise ConfigError("several folders: say with --out where their summary is to be written")
    from prl.tools.report.sweep import write_summary

    out = args.out or dirs[0]
    write_summary(*dirs, out=out, metrics=args.metric, threshold=args.threshold)
    console.print(Markdown((out / "summary.md").read_text(encoding="utf-8"), hyperlinks=False))
    print(out / "summary.html")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends any program that prints
    sys.exit(main())
