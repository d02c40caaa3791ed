"""Charts for the notebooks on sampling and rollouts, shown below the cell that asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drawing import COLOURS, CREDIT, DPI, GREY, show
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

Line = tuple[Sequence[float], Sequence[float]]  # places on x, values
MOST_COLOURS = 256  # of a palette
HUES = ("#6b6b6b", "#b85400", "#1f5f99", "#3d8f4d", "#8a3d8f", "#c2002f")


@dataclass(frozen=True)
class Panel:
    """lines, dots: by name, in one colour for each name. level: a grey line across."""

    title: str
    xlabel: str
    ylabel: str
    lines: Mapping[str, Line] = field(default_factory=dict)
    dots: Mapping[str, Line] = field(default_factory=dict)
    level: float | None = None
    logx: bool = False


def panels(*given: Panel) -> None:
    """Side by side, with one legend."""
    figure = Figure(figsize=(max(7.0, 4.3 * len(given)), 3.2), dpi=DPI, layout="constrained")
    names = dict.fromkeys(name for panel in given for name in (*panel.lines, *panel.dots))
    hues = {name: HUES[place] for place, name in enumerate(names)}
    for ax, panel in zip(figure.subplots(1, len(given), squeeze=False)[0], given, strict=True):
        if panel.level is not None:
            ax.axhline(panel.level, color=GREY, linewidth=0.8, linestyle="--")
        for name, (x, y) in panel.lines.items():
            ax.plot(x, y, color=hues[name], marker="" if name in panel.dots else ".")
        for name, (x, y) in panel.dots.items():
            ax.plot(x, y, "o", color=hues[name], markersize=4.5, markerfacecolor="white")
        ax.set(xlabel=panel.xlabel, ylabel=panel.ylabel, xscale="log" if panel.logx else "linear")
        ax.set_title(panel.title, fontsize=11)
    if len(hues) > 1:
        shown = [Line2D([], [], color=hue, marker=".", label=name) for name, hue in hues.items()]
        figure.legend(handles=shown, loc="outside lower center", ncols=len(hues), frameon=False)
    show(figure, COLOURS)


def clouds(titled: Mapping[str, Tensor], half_width: float) -> None:
    """Points in the plane, [N, 2] each, side by side at one scale."""
    figure = Figure(figsize=(2.4 * len(titled), 2.7), dpi=DPI, layout="constrained")
    for ax, (title, points) in zip(figure.subplots(1, len(titled)), titled.items(), strict=True):
        ax.plot(points[:, 0], points[:, 1], ".", markersize=1.3, color=HUES[2], alpha=0.6)
        ax.set(xlim=(-half_width, half_width), ylim=(-half_width, half_width), xticks=[], yticks=[], aspect="equal")
        ax.set_title(title, fontsize=10)
    show(figure, COLOURS)


def captioned_rows(rows: Mapping[str, Sequence[Tensor]], captions: Sequence[Sequence[str]]) -> None:
    """Rows of pictures, [3, H, W] in [-1, 1], under a title each; every picture has a caption of its own."""
    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(1.35 * columns + 1.2, 1.6 * len(rows) + 0.3), dpi=DPI, layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, (title, pictures), texts in zip(axes, rows.items(), captions, strict=True):
        row[0].set_ylabel(title, fontsize=10, rotation=0, ha="right", va="center")
        for ax, picture, text in zip(row, pictures, texts, strict=True):
            ax.imshow(((picture.clamp(-1, 1) + 1) / 2).permute(1, 2, 0), interpolation="nearest")  # [H, W, 3]
            ax.set_title(text, fontsize=8)
            ax.set(xticks=[], yticks=[])
    figure.supxlabel(CREDIT, fontsize=10)
    show(figure, MOST_COLOURS)


def marked_steps(kinds: Mapping[str, Sequence[Sequence[int]]], steps: int) -> None:
    """Of each kind, epoch by epoch downward, which of `steps` steps are marked."""
    figure = Figure(figsize=(2.5 * len(kinds), 2.9), dpi=DPI, layout="constrained")
    for ax, (title, epochs) in zip(figure.subplots(1, len(kinds)), kinds.items(), strict=True):
        ax.imshow([[float(step in marked) for step in range(steps)] for marked in epochs], cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
        ax.set(xlabel="step", xticks=range(steps), yticks=range(0, len(epochs), 2))
        ax.set_title(title, fontsize=10)
        ax.set_ylabel("epoch")
    show(figure, COLOURS)
