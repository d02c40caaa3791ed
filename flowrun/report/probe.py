"""What the probe measured before the run learned: by how much rollouts differ from training, and how much of it is rounding."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from flowrun.report.curves import HUES, svg
from flowrun.report.section import Section

PREFIX, FLOOR = "probe/", "floor_"
MEASURED = {"log_prob": "log-probability", "mean": "mean of a step", "final": "end of a walk"}
NOTE = "Differences between a step as the rollout computed it and as training computes it; rounding: the same without accelerators."


def probe_section(once: Mapping[str, float]) -> Section | None:
    """None for a run that was not probed."""
    rows = [
        [title, *(f"{once[f'{PREFIX}{kind}{name}_{of}']:.3g}" for kind in ("", FLOOR) for of in ("max", "p99"))]
        for name, title in MEASURED.items()
        if f"{PREFIX}{name}_max" in once
    ]
    if not rows:
        return None
    head = ["difference in", "greatest", "99th percentile", "greatest by rounding", "99th percentile by rounding"]
    drawings = [_bars(once)] if any(once.get(f"{PREFIX}{name}_max", 0) > 0 for name in MEASURED) else []
    return Section("Probe", NOTE, [head, *rows], drawings=drawings)


def _bars(once: Mapping[str, float]) -> str:
    """Greatest differences, on a logarithmic scale; nought has no bar."""
    names = [name for name in MEASURED if f"{PREFIX}{name}_max" in once]

    def fill(axes: Axes) -> None:
        for shift, (kind, label) in enumerate((("", "this run"), (FLOOR, "rounding"))):
            values = [once[f"{PREFIX}{kind}{name}_max"] for name in names]
            axes.barh([place + 0.36 * shift for place in range(len(names))], values, 0.34, color=HUES[shift], label=label)
        axes.set_yticks([place + 0.18 for place in range(len(names))], [MEASURED[name] for name in names])
        axes.set(xscale="log")
        axes.set_title("greatest difference", loc="left", fontsize=9)
        axes.legend(frameon=False, fontsize=7)

    return svg((4.4, 2.2), fill)
