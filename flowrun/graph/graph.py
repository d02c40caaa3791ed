"""A pipeline's units in execution order, and what follows from their declarations. Nothing is run.

Dependences only point forward in the order, so one pass over the units finds what is reached: linear in the number of
declared reads and writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property

from flowrun.graph.conflict import Conflict, conflicts
from flowrun.graph.unit import EVERYTHING, Param, Unit
from flowrun.graph.wanted import Wanted


class Writers:
    """Who may have written a parameter up to now: all may-writers back to the latest certain one, that one included.

    The latest writer alone is not enough: a may-writer that returned nothing leaves the value of an earlier one."""

    def __init__(self) -> None:
        self._of: dict[Param, list[int]] = {}
        self._certain: dict[Param, int] = {}
        self._barriers: list[int] = []

    def add(self, i: int, unit: Unit) -> None:
        if unit.is_barrier:
            self._barriers.append(i)
        for param in unit.writes:
            if param in unit.certain_writes:
                self._of[param], self._certain[param] = [i], i
            else:
                self._of.setdefault(param, []).append(i)

    def of(self, param: Param) -> list[int]:
        """In execution order; the data itself, which comes before every unit, is not listed."""
        since = self._certain.get(param, -1)
        return sorted([*self._of.get(param, ()), *(b for b in self._barriers if b > since)])

    def has_certain(self, param: Param) -> bool:
        return param in self._certain

    def params(self) -> list[Param]:
        return list(self._of)


class UnitGraph:
    """units: in execution order; indices below are places in it.

    Raises ValueError when two units that draw random numbers share a name, since draws are keyed by it."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        drawing = Counter(unit.name for unit in self.units if unit.random != "none")
        for name, count in drawing.items():
            if count > 1:
                raise ValueError(f"unit {name}: {count} units of this name would draw the same random numbers; rename")

    @cached_property
    def edges(self) -> tuple[tuple[int, int, Param], ...]:
        """True dependences: (possible writer, reader, parameter). As many as there are pairs; splitters do without."""
        writers, found = Writers(), []
        for i, unit in enumerate(self.units):
            reads = [EVERYTHING, *sorted(writers.params())] if unit.is_barrier else sorted(unit.reads)
            found += [(w, i, param) for param in reads for w in writers.of(param)]
            writers.add(i, unit)
        return tuple(found)

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Every ordered pair of units that must not change places, with the parameter and the kind."""
        return tuple(conflicts(self.units, range(len(self.units)), range(len(self.units))))

    @cached_property
    def chains(self) -> dict[Param, tuple[int, ...]]:
        """Parameter -> all units that may write it, in execution order."""
        found: dict[Param, list[int]] = {}
        for i, unit in enumerate(self.units):
            for param in unit.writes:
                found.setdefault(param, []).append(i)
        return {param: tuple(ids) for param, ids in found.items()}

    def related(self, trained: Collection[str]) -> set[int]:
        """Units whose own computation calls a trained model: where every split starts. TypeError for a bare string."""
        if isinstance(trained, str):
            raise TypeError(f"trained is the text {trained!r}; give a collection of names: [{trained!r}]")
        return {i for i, unit in enumerate(self.units) if trained_models(unit, trained)}

    def gradient_units(self, trained: Collection[str]) -> set[int]:
        """Units that depend on a trained model, directly or through what they read: gradients flow through them."""
        return self.reached(self.related(trained))

    def reached(self, start: Collection[int]) -> set[int]:
        """`start` and every unit that reads, over true dependences, what one of them may have written."""
        spread, found = Spread(), set()
        for i, unit in enumerate(self.units):
            if i in start or spread.touches(unit):
                found.add(i)
                spread.grow(i, unit)
            else:
                spread.cover(i, unit)
        return found

    def needed_for(self, wanted: Collection[Param] | None, roots: Collection[int] = ()) -> set[int]:
        """Units that must run so that the final values of `wanted` (None: all) and what `roots` return are right."""
        later, found = Wanted(wanted), set()
        for i in reversed(range(len(self.units))):
            unit = self.units[i]
            if i in roots or (bool(later) if unit.is_barrier else not later.isdisjoint(unit.writes)):
                found.add(i)
                later.before(unit)
        return found


class Spread:
    """Which parameters hold a value that comes from a growing set of units, while the order is walked."""

    def __init__(self) -> None:
        self._written: dict[Param, int] = {}  # latest write by the set
        self._covered: dict[Param, int] = {}  # latest certain write by another unit
        self._barrier = -1  # latest barrier in the set: it may have written anything
        self._held: set[Param] = set()

    def touches(self, unit: Unit) -> bool:
        if unit.is_barrier:
            return bool(self._held) or self._barrier >= 0
        return any(self.holds(param) for param in unit.reads)

    def holds(self, param: Param) -> bool:
        return max(self._written.get(param, -1), self._barrier) > self._covered.get(param, -1)

    def grow(self, i: int, unit: Unit) -> None:
        if unit.is_barrier:
            self._barrier = i
        self._written.update(dict.fromkeys(unit.writes, i))
        self._held |= unit.writes

    def cover(self, i: int, unit: Unit) -> None:
        self._covered.update(dict.fromkeys(unit.certain_writes, i))
        self._held -= unit.certain_writes


def trained_models(unit: Unit, trained: Collection[str]) -> list[str]:
    """Those of the unit's models that are trained, wholly or in part, or belong to what is trained."""
    return [model for model in unit.onload_model_names if any(same_branch(model, name) for name in trained)]


def same_branch(model: str, trained: str) -> bool:
    """Attribute paths of which one lies inside the other: `dit` and `dit.blocks.3`. An empty path is every model."""
    if not model or not trained:
        return True
    return model == trained or model.startswith(f"{trained}.") or trained.startswith(f"{model}.")
