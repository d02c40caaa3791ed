"""Names of points that stand clear of one another and of the points."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

SIZE = 8  # points of type
# Where a label may stand beside its point, in the order of preference: horizontal and vertical distance, in points of type.
PLACES = tuple(
    (side * away, up) for away in (9, 22, 45) for up in (0, 12, -12, 26, -26, 42, -42, 60, -60, 80, -80, 105, -105) for side in (1, -1)
)
ROOM = 5.0  # points of type around a point that stay free


def write_labels(ax: Axes, named: Sequence[tuple[float, float, str]]) -> None:
    """named: x, y and text of each point, in data coordinates. The axes' limits must be final. A label that finds no free place
    stands beside its point all the same."""
    canvas = ax.figure
    canvas.draw_without_rendering()
    scale = canvas.dpi / 72
    taken = [_around(ax.transData.transform((x, y)), ROOM * scale) for x, y, _ in named]
    for x, y, text in named:
        label = ax.annotate(text, (x, y), PLACES[0], textcoords="offset points", fontsize=SIZE, va="center")
        boxes = []
        for place in PLACES:
            label.set(position=place, horizontalalignment="left" if place[0] > 0 else "right")
            box = label.get_window_extent()
            boxes.append((sum(map(box.overlaps, taken)) + 10 * (not _inside(box, ax.bbox)), len(boxes), place, box))
            if boxes[-1][0] == 0:
                break
        _, _, place, box = min(boxes, key=lambda one: one[:2])
        label.set(position=place, horizontalalignment="left" if place[0] > 0 else "right")
        if abs(place[1]) > 12 or abs(place[0]) > 9:
            ax.annotate(
                "",
                (x, y),
                place,
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": "#8a8a8a", "linewidth": 0.6},
            )
        taken.append(box)


def _around(point: Sequence[float], room: float) -> Bbox:
    x, y = point
    return Bbox.from_extents(x - room, y - room, x + room, y + room)


def _inside(inner: Bbox, outer: Bbox) -> bool:
    return inner.x0 >= outer.x0 and inner.x1 <= outer.x1 and inner.y0 >= outer.y0 and inner.y1 <= outer.y1
