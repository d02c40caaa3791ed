"""Pictures for the notebooks, shown below the cell that asks: a split as a graph, rows of pictures, curves.

A split is drawn with one column per unit, in execution order, and two lanes: units that run once into the cache, and
units that run in every training step. The bar above them is the data, the bar below them the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

from IPython.display import Image, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path
from PIL import Image as Pillow
from torch import Tensor

from flowrun.graph import Param, Unit, UnitGraph
from flowrun.graph.graph import same_branch
from flowrun.splitters import Split

DATA, CACHE, TRAIN, LOSS = 3.3, 2.2, 1.0, 0.0  # heights of the two bars and the two lanes
WIDTH, HEIGHT, BAR = 0.78, 0.46, 0.24  # of a unit's box, and the height of a bar; columns are 1 apart
NEAR = 0.18, 0.32  # from the data's bar and the loss's bar to the labels of their arrows
BLUE, ORANGE, RED, GREY = "#1f5f99", "#b85400", "#c2002f", "#6b6b6b"
FILL = {CACHE: "#dceaf7", TRAIN: "#fde6d0"}
DPI, COLOURS = 100, 128  # a palette makes the files of the graphs three times smaller, with no visible loss
CREDIT = "Emoji: OpenMoji, openmoji.org, CC BY-SA 4.0"


def draw_splits(
    splits: Mapping[str, Split],
    inputs: Sequence[str],
    outputs: Sequence[str],
    trained: Collection[str],
    denoiser: str,
) -> None:
    """One picture per split, below one another, under their titles. All are splits of equally many units.

    inputs: names that the data supply; outputs: names that the loss reads; trained: names of the trained models;
    denoiser: the model that the loss calls."""
    count = len(next(iter(splits.values())).units)
    figure = Figure(figsize=(max(7.5, 1.55 * count), 3.1 * len(splits)), dpi=DPI, layout="constrained")
    for ax, (title, split) in zip(figure.subplots(len(splits), squeeze=False)[:, 0], splits.items(), strict=True):
        SplitPicture(ax, split, trained).draw(title, inputs, outputs, denoiser)
    show(figure, COLOURS)


@dataclass
class SplitPicture:
    """One split on one `ax`."""

    ax: Axes
    split: Split
    trained: Collection[str]

    def draw(self, title: str, inputs: Sequence[str], outputs: Sequence[str], denoiser: str) -> None:
        count = len(self.split.units)
        self.ax.set(xlim=(-1.05, count - 0.35), ylim=(-0.2, 3.5))
        self.ax.axis("off")
        self.ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
        lanes = {DATA: "data", CACHE: "cache:\nonce", TRAIN: "train:\nevery step", LOSS: "loss:\nevery step"}
        for height, text in lanes.items():
            self.ax.text(-1.02, height, text, va="center", fontsize=10, color=GREY)
        self._bar(DATA, ", ".join(inputs), "#eeeeee")
        self._bar(LOSS, f"calls {self._marked(denoiser)}", FILL[TRAIN])
        for i, unit in enumerate(self.split.units):
            self._box(i, unit)
        for (writer, reader), params in self._dependences(inputs, outputs).items():
            self._dependence(writer, reader, ",\n".join(_name(param) for param in params))
        for conflict in self.split.hazards:
            start, end = self._ends(conflict.first, conflict.second)
            label = f"{conflict.kind} {_name(conflict.param)}"
            self._arrow(start, end, 1 - 0.3 / (end[0] - start[0]), label, RED, dashed=True)

    def _dependences(self, inputs: Sequence[str], outputs: Sequence[str]) -> dict[tuple[int, int], list[Param]]:
        """(writer, reader) -> parameters. The data count as a unit before the first, the loss as one after the last.

        Those that a splitter left broken are drawn as hazards instead."""
        data, loss = Unit(name="data", output_params=tuple(inputs)), Unit(name="loss", input_params=tuple(outputs))
        found: dict[tuple[int, int], list[Param]] = {}
        broken = {(hazard.first, hazard.second, hazard.param) for hazard in self.split.hazards}
        for writer, reader, param in UnitGraph((data, *self.split.units, loss)).edges:
            if (writer - 1, reader - 1, param) not in broken:
                found.setdefault((writer - 1, reader - 1), []).append(param)
        return found

    def _dependence(self, writer: int, reader: int, label: str) -> None:
        count = len(self.split.units)
        if writer < 0:
            top, bottom = DATA - BAR / 2, self._lane(reader) + HEIGHT / 2
            self._arrow((reader, top), (reader, bottom), NEAR[0] / (top - bottom), label, GREY)
            return
        stored = writer in self.split.kept and (reader == count or reader in self.split.live)
        colour = BLUE if stored else ORANGE if writer in self.split.live else GREY
        if reader == count:
            top, bottom = self._lane(writer) - HEIGHT / 2, LOSS + BAR / 2
            self._arrow((writer, top), (writer, bottom), 1 - NEAR[1] / (top - bottom), label, colour, bold=stored)
        else:
            start, end = self._ends(writer, reader)
            at = 0.3 if start[1] == end[1] else min(0.5, 0.5 / (end[0] - start[0]))
            self._arrow(start, end, at, label, colour, bold=stored)

    def _ends(self, first: int, second: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """Through the room between the lanes; over the boxes within one lane."""
        start, end = self._lane(first), self._lane(second)
        side = HEIGHT / 2 if start <= end else -HEIGHT / 2
        return (first + 0.2, start + side), (second - 0.2, end + (side if start == end else -side))

    def _lane(self, i: int) -> float:
        return TRAIN if i in self.split.live else CACHE

    def _marked(self, model: str) -> str:
        return f"{model} *" if any(same_branch(model, name) for name in self.trained) else model

    def _bar(self, height: float, text: str, fill: str) -> None:
        left, right = -0.45, len(self.split.units) - 0.4
        self._rounded((left, height - BAR / 2), right - left, BAR, fill, "none")
        self.ax.text((left + right) / 2, height, text, ha="center", va="center", fontsize=9)

    def _box(self, i: int, unit: Unit) -> None:
        """Dashed: a cached unit that nothing needs, and that never runs."""
        lane, models = self._lane(i), ", ".join(map(self._marked, unit.onload_model_names))
        idle = lane == CACHE and i not in self.split.needed
        fill, edge = "white" if idle else FILL[lane], BLUE if lane == CACHE else ORANGE
        self._rounded((i - WIDTH / 2, lane - HEIGHT / 2), WIDTH, HEIGHT, fill, edge, dashed=idle)
        centred = {"ha": "center", "va": "center", "zorder": 4}
        self.ax.text(i, lane + (0.09 if models else 0), unit.name, fontsize=10, fontweight="bold", **centred)
        self.ax.text(i, lane - 0.12, models, fontsize=8, **centred)

    def _rounded(
        self, corner: tuple[float, float], width: float, height: float, fill: str, edge: str, dashed: bool = False
    ) -> None:
        shape, line = "round,pad=0,rounding_size=0.06", "--" if dashed else "-"
        self.ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=shape, facecolor=fill, edgecolor=edge,
                                         linestyle=line, zorder=3))  # fmt: skip

    def _arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        at: float,
        label: str,
        colour: str,
        *,
        bold: bool = False,
        dashed: bool = False,
    ) -> None:
        """Bent upward within one lane, else straight. at: where the label stands, 0 at the start, 1 at the end."""
        (x0, y0), (x1, y1) = start, end
        bend = min(0.42, 0.08 + 0.1 * (x1 - x0)) if y0 == y1 else 0.0
        path = Path([start, ((x0 + x1) / 2, (y0 + y1) / 2 + 2 * bend), end], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
        look = {"linewidth": 2 if bold else 1.2, "linestyle": (0, (3, 2)) if dashed else "-", "color": colour}
        self.ax.add_patch(FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=11, zorder=2, **look))
        x, y = x0 + at * (x1 - x0), y0 + at * (y1 - y0) + 4 * at * (1 - at) * bend
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.9}
        self.ax.text(x, y, label, ha="center", va="center", fontsize=8.5, color=colour, zorder=5, bbox=ground)


def contact_sheet(pictures: Sequence[Tensor | None], captions: Sequence[str], states: Sequence[Tensor]) -> None:
    """Column by column a picture, its caption, and the text encoder's states of the caption.

    pictures: [3, H, W] in [-1, 1], None where there is none. states: [L, width], token by token downward."""
    figure = Figure(figsize=(1.45 * len(captions), 3.0), dpi=DPI, layout="constrained")
    axes = figure.subplots(2, len(captions), height_ratios=(2, 1))
    limit = max(float(state.abs().max()) for state in states) / 3
    for above, below, picture, caption, state in zip(*axes, pictures, captions, states, strict=True):
        above.set_title(caption, fontsize=11)
        above.set_box_aspect(1)
        below.imshow(state, aspect="auto", cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
        if picture is None:
            above.axis("off")
        else:
            above.imshow(((picture + 1) / 2).permute(1, 2, 0), interpolation="nearest")  # [H, W, 3]
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    for ax, text in zip(axes[:, 0], ("target_latents,\ndecoded", "prompt_embeds"), strict=True):
        ax.set_ylabel(text, fontsize=10, rotation=0, ha="right", va="center")
    figure.supxlabel(CREDIT, fontsize=10)
    show(figure)


def picture_rows(rows: Mapping[str, Sequence[Tensor]], captions: Sequence[str]) -> None:
    """One row of pictures per title, one column per caption. Pictures: [3, H, W] in [-1, 1]."""
    figure = Figure(figsize=(1.1 * len(captions) + 1.2, 1.15 * len(rows) + 0.4), dpi=DPI, layout="constrained")
    axes = figure.subplots(len(rows), len(captions), squeeze=False)
    for row, (title, pictures) in zip(axes, rows.items(), strict=True):
        row[0].set_ylabel(title, fontsize=10, rotation=0, ha="right", va="center")
        for ax, picture in zip(row, pictures, strict=True):
            ax.imshow(((picture.clamp(-1, 1) + 1) / 2).permute(1, 2, 0), interpolation="nearest")  # [H, W, 3]
            ax.set(xticks=[], yticks=[])
    for ax, caption in zip(axes[0], captions, strict=True):
        ax.set_title(caption, fontsize=11)
    figure.supxlabel(CREDIT, fontsize=10)
    show(figure)


def loss_curve(losses: Sequence[float], every: int) -> None:
    """The loss of each step, and its mean over windows of `every` steps, on a logarithmic axis."""
    figure = Figure(figsize=(7.0, 2.6), dpi=DPI, layout="constrained")
    ax, steps = figure.subplots(), range(1, len(losses) + 1)
    ax.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.45, label="a step")
    windows = range(0, len(losses) - every + 1, every)
    means = [sum(losses[i : i + every]) / every for i in windows]
    ax.plot([i + (every + 1) / 2 for i in windows], means, color=ORANGE, marker="o", markersize=4, label=f"mean of {every} steps")
    ax.set(xlabel="step", ylabel="loss", yscale="log", xlim=(0, len(losses) + 1))
    ax.legend(frameon=False)
    show(figure, COLOURS)


def paired_errors(first: tuple[str, Sequence[float]], second: tuple[str, Sequence[float]], mean: float, error: float) -> None:
    """Left each pair's two errors against each other, right their differences first - second, with the mean and its standard error."""
    figure = Figure(figsize=(8.0, 3.2), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    most = max(*first[1], *second[1])
    left.plot([0, most], [0, most], color=GREY, linewidth=1)
    left.scatter(first[1], second[1], s=14, color=BLUE, alpha=0.7)
    left.set(xlabel=f"mse, {first[0]}", ylabel=f"mse, {second[0]}", title="a point per pair; grey: equal")
    differences = sorted(a - b for a, b in zip(first[1], second[1], strict=True))
    right.axhline(0, color=GREY, linewidth=1)
    right.plot(range(1, len(differences) + 1), differences, ".", color=BLUE)
    right.axhline(mean, color=ORANGE)
    right.axhspan(mean - error, mean + error, color=ORANGE, alpha=0.3, linewidth=0)
    right.set(xlabel="pair, by its difference", ylabel="difference of mse", title=f"mean {mean:.4f} +- {error:.4f}")
    show(figure, COLOURS)


def show(figure: Figure, colours: int | None = None) -> None:
    """Below the cell, as a PNG. colours: of its palette; None: exact."""
    png = BytesIO()
    figure.savefig(png, format="png", bbox_inches="tight")
    if colours is not None:
        drawn, png = Pillow.open(png).convert("RGB"), BytesIO()
        drawn.quantize(colours, dither=Pillow.Dither.NONE).save(png, format="PNG", optimize=True)
    display(Image(png.getvalue()))


def _name(param: Param) -> str:
    scope, name = param
    return name if scope == "shared" else f"{scope}.{name}"
