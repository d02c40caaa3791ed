"""sweep.png: what a sweep found, drawn by what was swept.

Accelerators: speed against deviation, a named point per setting. One number: a line over it. Two: a line for each value of the
one with fewer. The seed alone: a point each, mean and standard deviation. Anything else: a bar per setting.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from flowrun.config import Best
from flowrun.files import write_atomic
from flowrun.sweep.labels import write_labels
from flowrun.sweep.recommend import Point, points, recommended, speed_of
from flowrun.sweep.settings import SEED, SPEEDS, Figure, Setting, compared, is_acceleration, number, short, swept
from flowrun.sweep.table import RESULT, Row

BLUE, ORANGE, GREY = "#1f5f99", "#b85400", "#8a8a8a"
HUES = (BLUE, ORANGE, "#3d8f4d", "#8a3d8f", "#c2002f", "#6b6b6b")
DPI = 130
MARGIN = 1.6  # a logarithmic axis goes so far beyond its values


def draw(rows: Sequence[Row], figure: Figure | None, path: Path) -> Path | None:
    """None, and no file, when no job has what would be drawn."""
    canvas = drawn(rows, figure)
    if canvas is None:
        return None
    png = io.BytesIO()
    canvas.savefig(png, format="png")
    return write_atomic(path, png.getvalue())


def drawn(rows: Sequence[Row], figure: Figure | None) -> Canvas | None:
    """figure: by which settings that are no accelerators are compared."""
    canvas, settings = Canvas(figsize=(7.6, 4.6), dpi=DPI, layout="constrained"), compared(rows)
    if is_acceleration(rows):
        return canvas if _speeds(canvas, settings) else None
    return canvas if figure is not None and _settings(canvas, rows, settings, figure) else None


def _speeds(canvas: Canvas, settings: Sequence[Setting]) -> bool:
    """Each setting at its seconds and its greatest deviation, a whisker down to the 99th percentile, the bound across."""
    found = points(settings)
    if not found:
        return False
    ax, best, measured = (
        canvas.subplots(),
        recommended(found),
        [point for point in found if point.deviation is not None],
    )
    for point in found:
        colour = BLUE if point.qualifies else GREY
        y = 0.0 if point.deviation is None else point.deviation
        ax.plot([point.seconds] * 2, [y if point.p99 is None else point.p99, y], color=colour, linewidth=1, alpha=0.6)
        ax.plot(
            point.seconds,
            y,
            "o",
            color=ORANGE if point is best else colour,
            markersize=9 if point is best else 6,
            zorder=3,
        )
    bounds = sorted({point.bound for point in measured if point.bound is not None})
    for bound in bounds:
        ax.axhline(bound, color=ORANGE, linewidth=1, linestyle="--")
        ax.annotate(f"bound {bound:.2g}", (1, bound), (-4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                    ha="right", color=ORANGE, fontsize=8)  # fmt: skip
    ax.set_xlabel(f"seconds {SPEEDS[speed_of(settings)]}, without warm-up")
    ax.set_ylabel(_deviation_label(measured))
    ax.set_title(
        f"fastest within its bound: {best.label}"
        if best is not None
        else "no setting is known to stay within its bound",
        fontsize=10,
    )
    ax.margins(x=0.12)
    _from_zero(ax, [value for point in measured for value in (point.deviation, point.p99, point.bound)])
    if not measured:
        ax.set(yticks=[], ylim=(-1, 1))
    write_labels(ax, [(point.seconds, point.deviation or 0.0, _named(point)) for point in found])
    return True


def _named(point: Point) -> str:
    return f"{point.label}\n{point.seconds:.3g} s"


def _deviation_label(measured: Sequence[Point]) -> str:
    of = {row.get(f"{RESULT}deviation_of") for point in measured for row in point.setting.rows} - {None, ""}
    return (
        f"deviation of {' and '.join(sorted(of))}\ngreatest; line: down to the 99th percentile"
        if of
        else "no deviation was measured"
    )


def _from_zero(ax: Axes, values: Sequence[float | None]) -> None:
    """Logarithmic, with 0 at the foot, since the setting without accelerators deviates by nothing."""
    positive = [value for value in values if value]
    if not positive:
        return
    foot = 10.0 ** math.floor(math.log10(min(positive)))
    ax.set_yscale("symlog", linthresh=foot, linscale=0.5)
    ax.set_ylim(-0.35 * foot, max(positive) * MARGIN**2)
    ax.set_yticks([0, *(foot * 10.0**i for i in range(round(math.log10(max(positive) / foot)) + 1))])


def _settings(canvas: Canvas, rows: Sequence[Row], settings: Sequence[Setting], figure: Figure) -> bool:
    there = [setting for setting in settings if setting.each(figure.name)]
    keys = list(there[0].values) if there else []
    numeric = [key for key in keys if all(number(s.values[key]) is not None for s in there)]
    if not there:
        return False
    ax = canvas.subplots()
    if not keys and swept(rows) == [SEED]:
        _seeds(ax, there[0], figure)
    elif numeric and len(keys) <= 2:
        _lines(ax, there, figure, max(numeric, key=lambda key: len({s.values[key] for s in there})))
    else:
        _bars(ax, there, figure)
    which = max if figure.best is Best.greatest else min
    best = which(there, key=lambda setting: setting.mean(figure.name))
    if best.label:
        ax.set_title(f"{figure.best.value} {figure.name}: {best.label}", fontsize=10)
    return True


def _lines(ax: Axes, settings: Sequence[Setting], figure: Figure, key: str) -> None:
    """Over the numbers of `key`, a line for each value of the other setting; a whisker per point: one deviation of its seeds."""
    others = [name for name in settings[0].values if name != key]
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(", ".join(f"{short(name)}={setting.values[name]}" for name in others), []).append(setting)
    for place, (name, members) in enumerate(groups.items()):
        members = sorted(members, key=lambda setting: number(setting.values[key]))
        x = [number(setting.values[key]) for setting in members]
        ax.errorbar(x, *_means(members, figure), marker="o", capsize=3, color=HUES[place % len(HUES)], label=name,
                    linestyle=("-", "--", ":")[place // len(HUES) % 3])  # fmt: skip
    places = sorted({number(setting.values[key]) for setting in settings})
    if places[0] > 0 and places[-1] / places[0] >= 5:
        ax.set_xscale("log")
    if len(places) <= 8:
        ax.set_xticks(places, [f"{place:g}" for place in places])
        ax.minorticks_off()
    if others:
        ax.legend(frameon=False, fontsize=8)
    ax.set(xlabel=key, ylabel=_ylabel(settings, figure))


def _bars(ax: Axes, settings: Sequence[Setting], figure: Figure) -> None:
    """In the order of the jobs, from the first downward."""
    means, spreads = _means(settings, figure)
    which = max if figure.best is Best.greatest else min
    hues = [ORANGE if mean == which(means) else BLUE for mean in means]
    bars = ax.barh(range(len(settings)), means, xerr=spreads, color=hues, height=0.6, capsize=3)
    ax.bar_label(bars, fmt="%.4g", padding=4, fontsize=8)
    ax.set_yticks(range(len(settings)), [setting.label or "all" for setting in settings], fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.14)
    ax.set_xlabel(_ylabel(settings, figure))


def _seeds(ax: Axes, setting: Setting, figure: Figure) -> None:
    found = [(row[SEED], number(row.get(RESULT + figure.name))) for row in setting.rows]
    names, values = zip(*[(seed, value) for seed, value in found if value is not None], strict=True)
    mean, spread = fmean(values), stdev(values) if len(values) > 1 else 0.0
    ax.axhline(mean, color=ORANGE, linewidth=1)
    ax.axhspan(mean - spread, mean + spread, color=ORANGE, alpha=0.2, linewidth=0)
    ax.plot(range(len(values)), values, "o", color=BLUE)
    ax.set_xticks(range(len(values)), names)
    ax.set(xlabel="seed", ylabel=figure.name)
    ax.set_title(f"{figure.name}: {mean:.5g} +- {spread:.2g} over {len(values)} seeds", fontsize=10)


def _means(settings: Sequence[Setting], figure: Figure) -> tuple[list[float], list[float] | None]:
    """Over seeds, and standard deviations; None when no setting has two seeds."""
    each = [setting.each(figure.name) for setting in settings]
    spreads = [stdev(values) if len(values) > 1 else 0.0 for values in each]
    return [fmean(values) for values in each], spreads if any(len(values) > 1 for values in each) else None


def _ylabel(settings: Sequence[Setting], figure: Figure) -> str:
    seeds = max(len(setting.each(figure.name)) for setting in settings)
    return f"{figure.name}, mean and deviation of up to {seeds} seeds" if seeds > 1 else figure.name
