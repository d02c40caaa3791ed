"""Units, their graph, and their guarded execution."""

from flowrun.graph.conflict import Conflict
from flowrun.graph.draws import Draws, seed_of
from flowrun.graph.execute import Executor
from flowrun.graph.graph import UnitGraph
from flowrun.graph.guard import UndeclaredEffect
from flowrun.graph.state import Record, State
from flowrun.graph.unit import EVERYTHING, SCOPES, Param, Unit

__all__ = [
    "EVERYTHING", "SCOPES", "Conflict", "Draws", "Executor", "Param", "Record", "State", "UndeclaredEffect", "Unit",
    "UnitGraph", "seed_of",
]  # fmt: skip
