"""Sound when all cached units run first and all live ones after: no conflict may point from a live unit to a cached one.

Forward reachability over read-after-write, write-after-read and write-after-write, may-writes counted as writes.
"""

from __future__ import annotations

from flowrun.graph import Param, UnitGraph
from flowrun.splitters import Splitter


class Ordered(Splitter):
    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        found: set[int] = set()
        read: set[Param] = set()  # by live units so far
        written: set[Param] = set()
        barrier = False
        for i, unit in enumerate(graph.units):
            conflict = not (unit.reads | unit.writes).isdisjoint(written) or not unit.writes.isdisjoint(read)
            touches = conflict or (barrier and bool(unit.reads | unit.writes or unit.is_barrier)) or (unit.is_barrier and bool(read or written))
            if i in start or touches:
                found.add(i)
                read |= unit.reads
                written |= unit.writes
                barrier |= unit.is_barrier
        return found
