"""What a sweep says in the end: of accelerations the fastest that changes little enough, of other settings the best. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from flowrun.config import Best
from flowrun.sweep.settings import SPEEDS, Figure, Setting

CLOSE = 1.05  # speeds within this factor may be chance


@dataclass(frozen=True)
class Point:
    """A setting of accelerators: seconds of an epoch or step without warm-up, of its seeds the fewest, since other work on the
    machine can only slow a job down; of its deviation the greatest, None where none was measured; what it may be."""

    setting: Setting
    seconds: float
    deviation: float | None
    p99: float | None
    bound: float | None

    @property
    def qualifies(self) -> bool:
        return self.deviation is not None and self.bound is not None and self.deviation <= self.bound

    @property
    def label(self) -> str:
        return self.setting.label


def speed_of(settings: Sequence[Setting]) -> str | None:
    """The name of the figure by which settings are fast or slow."""
    return next((name for name in SPEEDS if any(setting.each(name) for setting in settings)), None)


def points(settings: Sequence[Setting]) -> list[Point]:
    """Those of which a job has ended well and says how fast it was, the fastest first."""
    speed = speed_of(settings)
    if speed is None:
        return []
    found = [Point(s, min(s.each(speed)), s.greatest("deviation_max"), s.greatest("deviation_p99"), s.mean("deviation_bound"))
             for s in settings if s.each(speed)]  # fmt: skip
    return sorted(found, key=lambda point: point.seconds)


def recommended(found: Sequence[Point]) -> Point | None:
    """The fastest that deviates by no more than it may."""
    return next((point for point in found if point.qualifies), None)


def of_accelerations(settings: Sequence[Setting]) -> list[str]:
    """Lines for the terminal."""
    found = points(settings)
    if not found:
        return ["recommended: nothing, for no job has ended well"]
    unit = SPEEDS[speed_of(settings)]
    if all(point.deviation is None for point in found):
        why = "no deviation was measured; acceleration.probe measures it in tasks that sample what they learn from"
        return [f"recommended: nothing, for {why}", f"the fastest is {found[0].label}: {_seconds(found[0], unit)}"]
    best = recommended(found)
    unmeasured = [point.label for point in found if point.deviation is None]
    more = [f"not measured: {', '.join(unmeasured)}"] if unmeasured else []
    if best is None:
        least = min((point for point in found if point.deviation is not None), key=lambda point: point.deviation)
        return [
            f"recommended: nothing, for every setting deviates by more than it may; the least is {least.label}: {_deviation(least)}",
            *more,
        ]
    return [f"recommended: {best.label}: {_seconds(best, unit)}{_against(best, found)}; {_deviation(best)}", *_words(best),
            *_beyond(best, found, unit), *_close(best, found), *more]  # fmt: skip


def of_figure(settings: Sequence[Setting], figure: Figure | None) -> list[str]:
    """The best setting by its mean over seeds; of seeds alone their mean and standard deviation. figure: None when no job has one."""
    if figure is None:
        return ["nothing is compared: no job that has ended well has the figure for it"]
    there = [setting for setting in settings if setting.each(figure.name)]
    if len(there) == 1 and len(values := there[0].each(figure.name)) > 1:
        return [f"{figure.name} {fmean(values):.6g} +- {stdev(values):.2g} over {len(values)} seeds"]
    if len(there) < 2:
        return [f"nothing is compared: one job alone has {figure.name}"]
    ordered = sorted(there, key=lambda setting: setting.mean(figure.name), reverse=figure.best is Best.greatest)
    first, second = ordered[:2]
    told = [f"{figure.name} {setting.mean(figure.name):.6g}" for setting in (first, second)]
    seeds = f", mean of {len(first.rows)} seeds" if len(first.rows) > 1 else ""
    return [
        f"best by {figure.best.value} {figure.name}: {first.label}: {told[0]}{seeds}; then {second.label}: {told[1]}"
    ]


def _seconds(point: Point, unit: str) -> str:
    warm = point.setting.mean("warmup_s")
    return f"{point.seconds:.3g} s {unit}" + (f" after a warm-up of {warm:.3g} s" if warm is not None else "")


def _against(best: Point, found: Sequence[Point]) -> str:
    plain = next((point for point in found if point.label == "none"), None)
    return (
        f", {plain.seconds / best.seconds:.2f} times as fast as with none"
        if plain is not None and plain is not best
        else ""
    )


def _deviation(point: Point) -> str:
    of = next((row["result.deviation_of"] for row in point.setting.rows if row.get("result.deviation_of")), "")
    return f"{of} deviate by up to {point.deviation:.2g}, and may by {point.bound:.2g}"


def _words(best: Point) -> list[str]:
    """How to ask for it."""
    words = [shlex.quote(f"{key}={value}") for key, value in best.setting.values.items() if value]
    return [f"  {' '.join(words)}"] if words else []


def _beyond(best: Point, found: Sequence[Point], unit: str) -> list[str]:
    faster = [point for point in found if point.seconds < best.seconds and point.deviation is not None]
    return [
        f"faster, but not within its bound: {point.label}: {point.seconds:.3g} s {unit}; {_deviation(point)}"
        for point in faster
    ]


def _close(best: Point, found: Sequence[Point]) -> list[str]:
    near = [p.label for p in found if p is not best and p.qualifies and p.seconds < CLOSE * best.seconds]
    return [f"within 5 % of its speed, which may be chance: {', '.join(near)}"] if near else []
