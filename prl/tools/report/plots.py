"""Curves as matplotlib's SVG, which a page shows as a picture that brings nothing along, and as one PNG of several."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

POINTS = 500
"""Longer curves are drawn as the means of as many neighbours as it takes."""
SMOOTH_FROM = 30
"""Curves of at least so many points are drawn faint, with a running mean over a 25th of them on top."""
COLOURS = ("#4a86c8", "#d9772e", "#3f9c66", "#9a70d0", "#cf5a8d", "#9c8c1f", "#3a9aa5", "#957b6e")
"""As the style sheet has them, for its legends; they can be read on white and on black."""
DASHES = ("-", "--", "-.")
"""Of the first `COLOURS` curves, the next, and the next; the style sheet's classes d0 to d2."""
GREY, FAINT = "#7d868f", "#7d868f55"
SIZE = (5.0, 2.5)  # [inch]
BOX = (0.125, 0.14, 0.845, 0.82)  # the axes in the figure: left, bottom, width, height


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A small chart of curves over the steps."""

    title: str
    unit: str
    series: Mapping[str, pd.Series]
    """By name; the index is the step."""
    bands: Mapping[str, tuple[pd.Series, pd.Series]] = field(default_factory=dict)
    """By name of a series: lower and upper edge of a band around it."""
    single: Mapping[str, list[pd.Series]] = field(default_factory=dict)
    """By name of a series: curves of single runs, dotted in its colour."""
    thin: Mapping[str, list[pd.Series]] = field(default_factory=dict)
    """By name of a series: the curves that it is the mean of, thin in its colour."""
    zero: bool = False
    """The axis begins at 0."""
    peaks: bool = False
    """A few peaks far above the rest may be cut off."""
    log: bool = False
    """The axis is logarithmic, where all values are above 0."""
    x: tuple[float, float] | None = None
    """Ends of the x axis; None = those of the curves."""
    left_out: int = 0
    """Curves that are not in `series`, for there are too many."""
    y: tuple[float, float] | None = None
    """Both ends of the y axis; None = all that is drawn is in sight."""

    @property
    def values(self) -> np.ndarray:
        """Of all curves."""
        return np.concatenate([series.dropna().to_numpy(float) for series in self.series.values()] or [np.zeros(0)])

    @property
    def cut(self) -> float | None:
        """Where the axis ends if a few peaks, such as the first step's, would flatten all the rest; else None."""
        values = self.values
        most = float(np.quantile(values, 0.97)) if len(values) >= SMOOTH_FROM else 0.0
        return 1.3 * most if self.peaks and 0 < 4 * most < values.max() else None

    @property
    def limits(self) -> tuple[float, float]:
        """Both ends of the x axis."""
        drawn = [series.index for series in self.series.values() if len(series)]
        ends = self.x or [float(end) for index in drawn for end in index[[0, -1]]]
        low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
        margin = 0.015 * (high - low) or 0.5  # a point at the end is whole
        return low - margin, high + margin

    def source(self) -> str:
        """The chart as the source of a page's `img`."""
        figure = Figure(figsize=SIZE, facecolor="none")
        self.draw(figure.add_axes(BOX))
        file = io.BytesIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "prl"}):
            figure.savefig(file, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"

    def draw(self, axes: Any) -> None:
        """Draw the curves into matplotlib's axes."""
        for place, (name, whole) in enumerate(self.series.items()):
            values, colour = thinned(whole.dropna()), COLOURS[place % len(COLOURS)]
            if name in self.bands:
                low, high = (smoothed(thinned(edge.dropna())) for edge in self.bands[name])
                axes.fill_between(low.index, low, high, color=colour, alpha=0.18, linewidth=0)
            if len(values) >= SMOOTH_FROM:
                axes.plot(values.index, values, linewidth=0.8, alpha=0.3, color=colour)
            marker = {"marker": "o", "markersize": 3.2} if len(values) <= 12 else {}
            dash = DASHES[place // len(COLOURS) % len(DASHES)]
            mean = smoothed(values)
            axes.plot(mean.index, mean, linewidth=1.5, linestyle=dash, color=colour, label=name, **marker)
            for curves, look in ((self.thin, {"linewidth": 0.7, "alpha": 0.6}), (self.single, {"linestyle": ":"})):
                for values in map(smoothed, map(thinned, curves.get(name, []))):
                    axes.plot(values.index, values, color=colour, **look)
        self._scale(axes)

    def _scale(self, axes: Any) -> None:
        values = self.values
        if self.log and len(values) and values.min() > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(numticks=5))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            if self.zero:
                axes.set_ylim(bottom=0, top=self.cut or (None if len(values) and values.max() > 0 else 1))
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.set_xlim(*self.limits)
        if self.y is not None:
            axes.set_ylim(*self.y)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.tick_params(length=0, labelsize=11, labelcolor=GREY, pad=4)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.patch.set_visible(False)
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)

    def data(self) -> dict[str, Any]:
        """What the page's script shows under the pointer: the box of the axes, their limits, the curves' values."""
        left, bottom, width, height = BOX
        values = {}
        for name, whole in self.series.items():
            series = thinned(whole.dropna())
            values[name] = [[digits(x) for x in series.index], [digits(y) for y in series]]
        return {"box": [left, 1 - bottom - height, width, height], "x": list(self.limits), "series": values}


def png(panels: list[Panel]) -> bytes:
    """The panels as a picture, two in a row."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6 * columns, 3.8 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        panel.draw(axes)
        axes.set_title(panel.title.replace("$", r"\$"), fontsize=11)
    for axes in grid[len(panels) :]:
        axes.remove()
    lines, names = grid[0].get_legend_handles_labels()
    names = [name.replace("$", r"\$") for name in names]
    figure.legend(lines, names, loc="outside lower center", ncols=columns, fontsize=9)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def thinned(series: pd.Series) -> pd.Series:
    """The series in at most POINTS points: means of neighbours."""
    if len(series) <= POINTS:
        return series
    bins = np.arange(len(series)) * POINTS // len(series)
    index = pd.Series(series.index, dtype=float).groupby(bins).mean()
    return pd.Series(series.groupby(bins).mean().to_numpy(), index=index.to_numpy())


def smoothed(series: pd.Series) -> pd.Series:
    """The running mean over a 25th of the points; of a curve of few points, the curve itself."""
    if len(series) < SMOOTH_FROM:
        return series
    return series.rolling(max(2, len(series) // 25), min_periods=1, center=True).mean()


def digits(value: float, kept: int = 4) -> float | None:
    """A number in so many digits; None for what JSON does not have."""
    return float(f"{value:.{kept}g}") if np.isfinite(value) else None


def short(value: float) -> str:
    """A tick's label: 0.25, 12k, 3e-05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 10_000):
            return f"{value / size:.3g}{letter}"
    return f"{value:.4g}"
