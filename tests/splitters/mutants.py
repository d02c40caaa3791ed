"""Splitters that are wrong in known ways: the checks must find them out."""

from __future__ import annotations

from flowrun.graph import UnitGraph
from flowrun.splitters import Splitter


class LatestWriterOnly(Splitter):
    """Dependences on the latest writer alone: forgets the value that a may-writer left standing."""

    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        latest, found = {}, set(start)
        for i, unit in enumerate(graph.units):
            reads = list(latest) if unit.is_barrier else unit.reads
            if any(latest.get(param) in found for param in reads):
                found.add(i)
            latest.update(dict.fromkeys(unit.writes, i))
        return found


class NoMayWrites(Splitter):
    """Takes every write for certain, but a take-over's, and dependences across scopes for none."""

    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        held, found = set(), set(start)
        for i, unit in enumerate(graph.units):
            if i in start or unit.reads & held:
                found.add(i)
                held |= unit.writes
            else:
                held -= unit.writes
        return found


class TooMuch(Splitter):
    """Sound, but not smallest: everything from the first live unit on."""

    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        return set(range(min(start), len(graph.units))) if start else set()
