"""Curves as SVG for a page: no style attributes, which its content policy refuses, and colours by class, so that the
page's style sheet chooses them for light and dark."""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

POINTS = 500
"""Longer curves are drawn as the means of as many neighbours as it takes."""
SMOOTH_FROM = 30
"""Curves of at least so many points are drawn faint, with a running mean over a 25th of them on top."""
COLOURS = 8
DASHES = ("-", "--", "-.")
"""Of the first `COLOURS` curves, the next, and the next; the style sheet's classes d0 to d2."""
# Stand-ins, which `themed` turns into the classes of the style sheet.
INK, DIM, LINE = "#00000a", "#00000b", "#00000c"
SERIES = [f"#0000{index:02x}" for index in range(0x10, 0x10 + COLOURS)]
CLASS = {INK: "ink", DIM: "dim", LINE: "line"} | {colour: f"s{index}" for index, colour in enumerate(SERIES)}
WIDTH, HEIGHT = 360, 180  # [pt] which is [px] where a page shows the panel in its own size
BOX = (0.125, 0.14, 0.845, 0.82)  # the axes in the figure: left, bottom, width, height
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A small chart of curves over one axis."""

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
    x_label: str = "step"
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
        found = self.values
        most = float(np.quantile(found, 0.97)) if len(found) >= SMOOTH_FROM else 0.0
        return 1.3 * most if self.peaks and 0 < 4 * most < found.max() else None

    @property
    def names(self) -> list[str]:
        return list(self.series)

    def svg(self) -> Markup:
        """The chart, `WIDTH` by `HEIGHT`."""
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="none")
        axes = figure.add_axes(BOX)
        for index, (name, whole) in enumerate(self.series.items()):
            values, colour = thinned(whole.dropna()), SERIES[index % COLOURS]
            style: dict[str, Any] = {"color": colour, "solid_joinstyle": "round"}
            if name in self.bands:
                low, high = (smoothed(thinned(edge.dropna())) for edge in self.bands[name])
                axes.fill_between(low.index, low, high, color=colour, alpha=0.18, linewidth=0)
            if len(values) >= SMOOTH_FROM:
                axes.plot(values.index, values, linewidth=0.8, alpha=0.3, **style)
                values = smoothed(values)
            few: dict[str, Any] = {"marker": "o", "markersize": 3.2} if len(values) <= 12 else {}
            axes.plot(values.index, values, linewidth=1.5, linestyle=DASHES[index // COLOURS % 3], **few, **style)
            for values in map(smoothed, map(thinned, self.thin.get(name, []))):
                axes.plot(values.index, values, linewidth=0.7, alpha=0.6, **style)
            for values in map(smoothed, map(thinned, self.single.get(name, []))):
                axes.plot(values.index, values, linewidth=1.5, linestyle=":", **style)
        self._scale(axes)
        return themed(figure)

    def _scale(self, axes: Any) -> None:
        found = self.values
        if self.log and len(found) and found.min() > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(numticks=5))
            axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        else:
            if self.zero:
                axes.set_ylim(bottom=0, top=self.cut or (None if len(found) and found.max() > 0 else 1))
            axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: short(value)))
        axes.set_xlim(*self.limits)
        if self.y is not None:
            axes.set_ylim(*self.y)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.tick_params(length=0, labelsize=11, labelcolor=DIM, pad=4)
        axes.grid(axis="y", color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.patch.set_visible(False)
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(LINE)

    @property
    def limits(self) -> tuple[float, float]:
        """Both ends of the x axis."""
        drawn = [series.index for series in self.series.values() if len(series)]
        ends = self.x or [float(end) for index in drawn for end in index[[0, -1]]]
        low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
        margin = 0.015 * (high - low) or 0.5  # a point at the end is whole
        return low - margin, high + margin

    def data(self) -> dict[str, Any]:
        """What the page's script shows under the pointer: the box of the axes, their limits, the curves' values."""
        left, bottom, width, height = BOX
        values = {}
        for name, whole in self.series.items():
            series = thinned(whole.dropna())
            values[name] = [[digits(x) for x in series.index], [digits(y) for y in series]]
        return {
            "box": [left, 1 - bottom - height, width, height],
            "x": list(self.limits),
            "x_label": self.x_label,
            "series": values,
        }


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
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.3g}{letter}"
    return f"{value:.4g}"


def themed(figure: Figure) -> Markup:
    """The figure as an inline SVG element, with classes for colours and attributes for every other style."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "prl"}):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = file.getvalue()
    root = ElementTree.fromstring(text[text.index("<svg") :])
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        _plain(element)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.set("aria-hidden", "true")
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _plain(element: ElementTree.Element) -> None:
    """Turn the style of an element into attributes and classes, and drop ids that nothing refers to."""
    if element.tag in (f"{{{SVG}}}g", f"{{{SVG}}}text"):
        element.attrib.pop("id", None)
    classes = []
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    for name, value in re.findall(r"([\w-]+):\s*([^;]+)", element.attrib.pop("style", "")):
        if value.lower() in CLASS:
            classes.append(f"{name[0]}-{CLASS[value.lower()]}")  # s-… for stroke, f-… for fill
        elif name == "font":  # the page has a family of its own
            element.set("font-size", re.search(r"[\d.]+", value)[0])  # type: ignore[index]
        else:
            element.set(name, value)
    if classes:
        element.set("class", " ".join(classes))
