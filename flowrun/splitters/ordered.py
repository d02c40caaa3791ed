"""Sound when all cached units run first and all live ones after: no conflict points from a live unit to a cached one.

Forward reachability over read-after-write, write-after-read and write-after-write, may-writes counted as writes.
"""

from __future__ import annotations

from flowrun.graph import Param, Unit, UnitGraph
from flowrun.splitters import Splitter


class Ordered(Splitter):
    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        touched, found = _Touched(), set()
        for i, unit in enumerate(graph.units):
            if i in start or touched.conflicts_with(unit):
                found.add(i)
                touched.add(unit)
        return found


class _Touched:
    """What the live units so far read and write."""

    def __init__(self) -> None:
        self._read: set[Param] = set()
        self._written: set[Param] = set()
        self._everything = False  # a barrier is among them

    def add(self, unit: Unit) -> None:
        self._read |= unit.reads
        self._written |= unit.writes
        self._everything |= unit.is_barrier

    def conflicts_with(self, unit: Unit) -> bool:
        if unit.is_barrier:
            return self._everything or bool(self._read or self._written)
        if self._everything and (unit.reads or unit.writes):
            return True
        return not (self._written.isdisjoint(unit.reads | unit.writes) and self._read.isdisjoint(unit.writes))
