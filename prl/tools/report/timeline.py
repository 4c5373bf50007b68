"""A trace of who was at work when, for chrome://tracing and ui.perfetto.dev, and the busy shares of each process."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from prl.base.files import write_atomically
from prl.base.terminal import Console
from prl.base.text import safe
from prl.tools.report.shares import Shares, is_work, processes, read_spans, rows, shares
from prl.transport.events import Span


def table(times: Shares) -> Table:
    """A row for each process: its share at work, with what, and what else it did."""
    drawn = Table("process", "busy", "with", "otherwise", title=times.sentence, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, busy, work, rest in rows(times):
        drawn.add_row(Text(name), f"{100 * busy:.0f} %", Text(work), Text(rest))
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


def write_timeline(run_dir: Path, console: Console) -> None:
    """Write `trace.json` into the directory of a run that has events, and show the shares while its steps were made."""
    spans = read_spans(run_dir, [])  # the page says what cannot be read
    if spans:
        write_atomically(run_dir / "trace.json", trace(spans))
    times = shares(spans)
    if times is not None:
        console.print(table(times))
