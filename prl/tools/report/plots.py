"""Curves as matplotlib's SVG, which a page shows as a picture that brings nothing along, and as files of several."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

from prl.base.text import safe

POINTS = 500
"""Most points of a drawn curve."""
SMOOTH_FROM = 30
"""Curves of at least so many points are drawn faint, with a running mean over a 25th of them on top."""
COLOURS = ("#4a86c8", "#d9772e", "#3f9c66", "#9a70d0", "#cf5a8d", "#9c8c1f", "#3a9aa5", "#957b6e")
"""As the style sheet has them, for its legends; they can be read on white and on black."""
DASHES = ("-", "-.", ":")
"""Dashes of the first `COLOURS` curves, the next, and the next; the style sheet's classes d0 to d2."""
INCOMPLETE = "--"
"""Dashes of a run that has not completed."""
GREY, FAINT = "#7d868f", "#7d868f55"
SIZE = (5.0, 2.5)  # [inch]
PAPER = (3.35, 2.1)
"""Size of a panel in a paper's column [inch]."""
LINE = 1.6 / 72
"""Height of a line of the legend [inch] for each point of its text."""
BOX = (0.125, 0.14, 0.845, 0.82)  # the axes in the figure: left, bottom, width, height


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A small chart of curves over the steps."""

    title: str
    series: Mapping[str, pd.Series]
    """Curves by name; the index is the step."""
    bands: Mapping[str, tuple[pd.Series, pd.Series]] = field(default_factory=dict)
    """Lower and upper edge of a band around a series, by its name."""
    thin: Mapping[str, list[pd.Series]] = field(default_factory=dict)
    """Curves that a series is the mean of, thin in its colour, by its name."""
    single: Mapping[str, list[pd.Series]] = field(default_factory=dict)
    """Curves of runs of a series that have not completed, dashed in its colour, by its name."""
    scatter: Literal["", "linear", "log"] = ""
    """The x axis of a chart of points, where the index has numbers in the place of steps."""
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Numbers that the x axis of a chart of points names, and how; empty = as they come."""
    line: pd.Series | None = None
    """A line of steps through a chart of points, which are numbered."""
    y: tuple[float, float] | None = None
    """Both ends of the y axis; None = all that is drawn is in sight."""

    @property
    def limits(self) -> tuple[float, float]:
        """Both ends of the x axis."""
        steps = np.concatenate([np.zeros(0), *(series.dropna().index for series in self.series.values())])
        return with_margin(steps, 0.015)  # a point at the end is whole

    def source(self) -> str:
        """The chart as the source of a page's `img`."""
        figure = Figure(figsize=SIZE, facecolor="none")
        self.draw(figure.add_axes(BOX))
        # Text stays text, in the page's font; the same chart has the same ids each time.
        with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "prl"}):
            picture = _saved(figure, "svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"

    def draw(self, axes: Any, size: float = 11) -> None:
        """Draw the curves into matplotlib's axes, whose numbers get this size [pt]."""
        for place, (name, whole) in enumerate(self.series.items()):
            values, colour = whole.dropna(), COLOURS[place % len(COLOURS)]
            if self.scatter:
                axes.plot(values.index, values, "o", markersize=5, alpha=0.8, color=colour if place else GREY)
                continue
            if name in self.bands:
                low, high = (smoothed(edge.dropna()) for edge in self.bands[name])
                axes.fill_between(low.index, low, high, color=colour, alpha=0.18, linewidth=0)
            if len(values) >= SMOOTH_FROM:
                axes.plot(thinned(values), linewidth=0.8, alpha=0.3, color=colour)
            marker = {"marker": "o", "markersize": 3.2} if len(values) <= 12 else {}
            dash = DASHES[place // len(COLOURS) % len(DASHES)]
            axes.plot(smoothed(values), linewidth=1.5, linestyle=dash, color=colour, label=name, **marker)
            for curve in self.thin.get(name, []):
                axes.plot(smoothed(curve), linewidth=0.7, alpha=0.7, linestyle=dash, color=colour)
            for curve in self.single.get(name, []):
                axes.plot(smoothed(curve), linewidth=1.2, color=colour, linestyle=INCOMPLETE)
        if self.line is not None:
            axes.step(self.line.index, self.line, where="post", linewidth=1.5, color=COLOURS[1])
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        self._scale(axes)
        axes.tick_params(which="both", length=0, labelsize=size, labelcolor=GREY, pad=4)

    def _scale(self, axes: Any) -> None:
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        if self.scatter == "log":
            axes.set_xscale("log")
        if self.ticks:
            axes.set_xticks(list(self.ticks), [_plain(name) for name in self.ticks.values()])
            axes.xaxis.set_minor_locator(NullLocator())
        elif not self.scatter:
            axes.set_xlim(*self.limits)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        if self.y is not None:
            axes.set_ylim(*self.y)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.patch.set_visible(False)
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)


def pictures(panels: list[Panel]) -> dict[str, bytes]:
    """Files of the panels by name: a PNG, two panels in a row, for a screen; PDF and SVG as wide as a paper's column.

    The PDF brings its fonts along, and the text of the SVG is text.
    """
    options = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "prl"}
    with matplotlib.rc_context(options):
        wide, narrow = _figure(panels, min(2, len(panels)), (6.0, 3.8), 11), _figure(panels, 1, PAPER, 7)
        return {
            "curves.png": _saved(wide, "png", dpi=110),
            "curves.pdf": _saved(narrow, "pdf", metadata={"CreationDate": None}),
            "curves.svg": _saved(narrow, "svg", metadata={"Date": None}),
        }


def _figure(panels: list[Panel], columns: int, size: tuple[float, float], text: float) -> Figure:
    """The panels in columns, each of this size [inch], with text of so many points and a legend below."""
    rows = -(-len(panels) // columns)
    lines = -(-len(panels[0].series) // columns)
    height = rows * size[1] + lines * text * LINE
    figure = Figure(figsize=(size[0] * columns, height), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        panel.draw(axes, text)
        axes.set_title(_plain(panel.title), fontsize=text)
        if not panel.scatter:
            axes.set_xlabel("step", fontsize=text, color=GREY)
    for axes in grid[len(panels) :]:
        axes.remove()
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, map(_plain, names), loc="outside lower center", ncols=columns, fontsize=text - 1)
    return figure


def _plain(text: str) -> str:
    """The text as a figure shows it: harmless, and none of it a formula."""
    return safe(text).replace("$", r"\$")


def _saved(figure: Figure, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, **options)
    return file.getvalue()


def with_margin(values: Any, share: float) -> tuple[float, float]:
    """Both ends of an axis for these values, with a share of their range beside them."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = share * (high - low) or 0.5
    return low - margin, high + margin


def thinned(series: pd.Series) -> pd.Series:
    """Every so-manieth point of the series, at most POINTS of them, the last among them."""
    return series.iloc[:: -(len(series) // POINTS + 1)].iloc[::-1]


def smoothed(series: pd.Series) -> pd.Series:
    """The running mean over a 25th of the points, thinned; of a curve of few points, the curve itself."""
    if len(series) < SMOOTH_FROM:
        return series
    return thinned(series.rolling(max(2, len(series) // 25), min_periods=1, center=True).mean())
