"""No split: every unit is live. What the other splitters are measured against."""

from __future__ import annotations

from flowrun.graph import UnitGraph
from flowrun.splitters import Splitter


class Unsplit(Splitter):
    why = "nothing is cached by this splitter"

    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        return set(range(len(graph.units)))
