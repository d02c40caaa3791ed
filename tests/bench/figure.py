"""One measured figure: what it is, its value, what is to be reached, and why it was missed if it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Figure:
    """reached: None for a figure that has no target."""

    name: str
    value: str
    target: str = ""
    reached: bool | None = None

    @property
    def verdict(self) -> str:
        return {None: "", True: "reached", False: "MISSED"}[self.reached]


def interleaved(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Medians of two measurements taken in turns, so that what the machine does besides reaches both alike."""
    pairs = [(first(), second()) for _ in range(rounds)]
    return median(a for a, _ in pairs), median(b for _, b in pairs)
