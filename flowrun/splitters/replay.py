"""The smallest sound split: live is what depends on the live, and nothing else.

A cached unit may write a name between two live ones, or before them; stage 2 walks the original order and re-applies
what each cached unit returned at its own place, so only true dependences count. Every earlier may-writer of a name,
back to the latest certain one, is a possible source of its value.
"""

from __future__ import annotations

from flowrun.graph import UnitGraph
from flowrun.splitters import Splitter


class Replay(Splitter):
    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        return graph.reached(start)
