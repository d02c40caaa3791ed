"""Curves of what was logged, drawn into the page."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # (step, value)
Style = tuple[str, str]  # colour, stroke
SCORES = ("reward", "samples")  # first parts of names whose second part is a reward
UNTOLD = ("epoch",)  # goes with the steps
SIZE = (4.4, 2.7)  # inches
HUES = ("#1f5f99", "#b85400", "#3d8f4d", "#8a3d8f", "#c2002f", "#6b6b6b")
STROKES = ("-", "--", ":", "-.")
MARKED, SMOOTHED = 40, 100  # points; fewer are marked one by one, and more are also shown as a running mean
WINDOW = 0.05  # of a curve, for its running mean
PARAMETERS = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none", "svg.hashsalt": "flowrun"}


def panels(curves: Mapping[str, Points]) -> dict[str, dict[str, Points]]:
    """Curves by panel, by line: what rollouts and samples score by one reward share a panel, and so do the phases of seconds/...;
    reward/red/group_std and reward/size/group_std are lines of group_std. Steady numbers are no curves."""
    found: dict[str, dict[str, Points]] = {}
    for name, points in curves.items():
        if name in UNTOLD or len(points) < 2 or steady(points):
            continue
        first, *rest = name.split("/")
        title, line = (rest[-1], first) if len(rest) == 1 and first in SCORES else (first, "/".join(rest) or first)
        if len(rest) == 2:
            title, line = rest[1], f"{first} {rest[0]}"
        found.setdefault(title, {})[line] = points
    return found


def steady(points: Points) -> bool:
    """Whether it is one number all along."""
    return len({value for _, value in points}) == 1


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A colour and a stroke for each line; the same for the same line in every panel."""
    return {name: (HUES[place % len(HUES)], STROKES[place // len(HUES) % len(STROKES)]) for place, name in enumerate(names)}


def draw(title: str, lines: Mapping[str, Points], style: Mapping[str, Style] | None = None) -> str:
    """An <svg> with a line for each name; the same lines give the same text. style: of lines that a legend elsewhere names."""
    given = styles(list(lines)) if style is None else style

    def fill(axes: Axes) -> None:
        for name, points in lines.items():
            _line(axes, name, points, *given[name])
        axes.set_xlabel("step")
        axes.set_title(title, loc="left", fontsize=9)
        axes.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
        if style is None and (len(lines) > 1 or title not in lines):
            axes.legend(frameon=False, fontsize=7)

    return svg(SIZE, fill)


def _line(axes: Axes, name: str, points: Points, hue: str, style: str) -> None:
    steps, values = np.asarray(points).T
    smooth = len(points) > SMOOTHED
    axes.plot(steps, values, style, color=hue, alpha=0.3 if smooth else 1, marker="." if len(points) <= MARKED else "",
              label=None if smooth else name)  # fmt: skip
    if smooth:
        axes.plot(*running_mean(steps, values, max(2, int(len(points) * WINDOW))), style, color=hue, label=name)


def running_mean(steps: np.ndarray, values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """[N], [N] -> [N - window + 1] each: means of `window` neighbours, each at the mean of their steps."""
    kernel = np.full(window, 1 / window)
    return np.convolve(steps, kernel, "valid"), np.convolve(values, kernel, "valid")


def svg(size: tuple[float, float], fill: Callable[[Axes], None]) -> str:
    """What `fill` draws, as an element that stands in HTML. size: width and height in inches."""
    with mpl.rc_context(PARAMETERS):
        figure, text = Figure(figsize=size, layout="constrained"), io.StringIO()
        fill(figure.subplots())
        figure.savefig(text, format="svg", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
