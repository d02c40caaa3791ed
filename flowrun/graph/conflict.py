"""Conflicts: pairs of units that must not change places, since they touch one parameter and one of them writes it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from flowrun.graph.unit import EVERYTHING, Param, Unit


@dataclass(frozen=True)
class Conflict:
    """Two units in execution order and the parameter. kind: RAW, WAR or WAW (read after write, and so on).

    Of a unit that reads and writes everything the parameter is EVERYTHING."""

    kind: str
    param: Param
    first: int
    second: int

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(self.param)} {self.first}->{self.second}"


def conflicts(units: Sequence[Unit], firsts: Collection[int], seconds: Collection[int]) -> Iterator[Conflict]:
    """Conflicts of an earlier unit of `firsts` with a later one of `seconds`; found as they are asked for."""
    seen = _Seen()
    for j, unit in enumerate(units):
        if j in seconds:
            yield from seen.everything(j, unit) if unit.is_barrier else seen.declared(j, unit)
        if j in firsts:
            seen.add(j, unit)


class _Seen:
    """Who has read and written what, up to now."""

    def __init__(self) -> None:
        self._readers: dict[Param, list[int]] = {}
        self._writers: dict[Param, list[int]] = {}
        self._barriers: list[int] = []
        self._active: list[tuple[int, bool]] = []  # (unit, does it write), of those that read or write anything

    def add(self, i: int, unit: Unit) -> None:
        if unit.is_barrier:
            self._barriers.append(i)
        if unit.is_barrier or unit.reads or unit.writes:
            self._active.append((i, unit.is_barrier or bool(unit.writes)))
        for param in unit.reads:
            self._readers.setdefault(param, []).append(i)
        for param in unit.writes:
            self._writers.setdefault(param, []).append(i)

    def declared(self, j: int, unit: Unit) -> Iterator[Conflict]:
        if unit.reads or unit.writes:
            yield from (Conflict("RAW" if unit.reads else "WAW", EVERYTHING, i, j) for i in self._barriers)
        for param in sorted(unit.reads):
            yield from (Conflict("RAW", param, i, j) for i in self._writers.get(param, ()))
        for param in sorted(unit.writes):
            yield from (Conflict("WAR", param, i, j) for i in self._readers.get(param, ()))
            yield from (Conflict("WAW", param, i, j) for i in self._writers.get(param, ()))

    def everything(self, j: int, barrier: Unit) -> Iterator[Conflict]:
        yield from (Conflict("RAW" if writes else "WAR", EVERYTHING, i, j) for i, writes in self._active)
