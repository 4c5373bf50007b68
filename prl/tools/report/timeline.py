"""A trace of who was at work when, for chrome://tracing and ui.perfetto.dev, and the busy shares of each process.

    prl timeline <run>

Writes `trace.json` into the run directory, of runs that finished, crashed or still run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from prl.errors import ConfigError
from prl.monitors.terminal import Console
from prl.monitors.text import as_message, safe
from prl.tools import named, run_command
from prl.tools.report.runs import read_run
from prl.tools.report.shares import Shares, is_work, processes, read_spans, shares
from prl.transport.events import Span
from prl.transport.files import write_atomically

WIDTH = 160
"""Of the table in a file or a pipe, characters."""


def table(times: Shares) -> Table:
    """A row for each process: its share at work, with what, and what else it did."""
    drawn = Table("process", "busy", "with", "otherwise", title=times.sentence, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, did in times.did.items():
        shown = {what: f"{what} {100 * share:.0f} %" for what, share in did.items() if share >= 0.005}
        work = ", ".join(text for what, text in shown.items() if is_work(what))
        rest = ", ".join(text for what, text in shown.items() if not is_work(what))
        drawn.add_row(Text(name), f"{100 * times.busy(name):.0f} %", Text(work), Text(rest))
    return drawn


def trace(spans: Sequence[Span]) -> bytes:
    """The spans as Chrome's trace events, a thread for each process: https://ui.perfetto.dev opens the file."""
    threads = {name: number for number, name in enumerate(processes(spans))}
    began = min((span.start for span in spans), default=0.0)
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": safe(name)}}
        for name, number in threads.items()
    ]
    events += [
        {
            "name": safe(span.what),
            "cat": "work" if is_work(span.what) else "waiting",
            "ph": "X",
            "pid": 1,
            "tid": threads[span.process],
            "ts": round(1e6 * (span.start - began), 1),
            "dur": round(1e6 * (span.stop - span.start), 1),
            "args": {"step": span.step},
        }
        for span in spans
    ]
    return msgspec.json.encode({"traceEvents": events})


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="prl timeline", description=str(__doc__).splitlines()[0])
    parser.add_argument("run", type=Path, help="a run directory, or its name under outputs/")
    return run_command(timeline, parser, argv)


def timeline(args: argparse.Namespace) -> None:
    """Write the trace, and print the shares. Raises ConfigError for what is not there."""
    run = read_run(named(args.run))
    spans = read_spans(run.dir, run.problems)
    for problem in run.problems:
        print(f"warning: {as_message(problem)}", file=sys.stderr)
    if not spans:
        raise ConfigError(f"{run.dir} has no events: it has not begun, or was made by a prl that recorded none")
    path = run.dir / "trace.json"
    write_atomically(path, trace(spans))
    if (times := shares(spans)) is not None:
        Console(width=None if sys.stdout.isatty() else WIDTH).print(table(times))
        print(f"shares of the {times.seconds:.0f} s from the first batch to the last update; the start is left out")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
