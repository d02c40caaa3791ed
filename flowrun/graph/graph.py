"""A pipeline's units in execution order, and what follows from their declarations. Nothing is run.

Dependences only point forward in the order, so one pass over the units finds what is reached: linear in the number of
declared reads and writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from flowrun.graph.unit import Param, Unit


@dataclass(frozen=True)
class Conflict:
    """Two units in order that touch one parameter, at least one of them writing. kind: RAW, WAR or WAW."""

    kind: str
    param: Param
    first: int
    second: int

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(self.param)} {self.first}->{self.second}"


class Writers:
    """Who may have written a parameter up to now: all may-writers back to the latest certain one, that one included.

    Looking only at the latest writer is wrong: a may-writer that returned nothing leaves the value of an earlier one."""

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
    """units: in execution order; indices below are places in it."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)

    @cached_property
    def edges(self) -> tuple[tuple[int, int, Param], ...]:
        """True dependences: (possible writer, reader, parameter)."""
        writers, found = Writers(), []
        for i, unit in enumerate(self.units):
            reads = writers.params() if unit.is_barrier else unit.reads
            found += [(w, i, param) for param in sorted(reads) for w in writers.of(param)]
            writers.add(i, unit)
        return tuple(found)

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Every ordered pair of units that must not change places, with the parameter and the kind."""
        return tuple(self.conflicts_between(range(len(self.units)), range(len(self.units))))

    @cached_property
    def chains(self) -> dict[Param, tuple[int, ...]]:
        """Parameter -> all units that may write it, in execution order."""
        found: dict[Param, list[int]] = {}
        for i, unit in enumerate(self.units):
            for param in unit.writes:
                found.setdefault(param, []).append(i)
        return {param: tuple(ids) for param, ids in found.items()}

    def related(self, trained: Collection[str]) -> set[int]:
        """Units whose own computation calls a trained model (the seed of every split)."""
        return {i for i, unit in enumerate(self.units) if any(same_branch(m, w) for m in unit.onload_model_names for w in trained)}

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

    def conflicts_between(self, firsts: Collection[int], seconds: Collection[int]) -> Iterator[Conflict]:
        """Conflicts of an earlier unit of `firsts` with a later one of `seconds`."""
        readers: dict[Param, list[int]] = {}
        writers: dict[Param, list[int]] = {}
        barriers: list[int] = []
        everything = ("*", "*")
        for j, unit in enumerate(self.units):
            if j in seconds:
                for b in barriers:
                    yield Conflict("RAW", everything, b, j)
                if unit.is_barrier:
                    yield from (Conflict("RAW", everything, i, j) for i in sorted({*sum(writers.values(), []), *sum(readers.values(), [])}))
                for param in sorted(unit.reads):
                    yield from (Conflict("RAW", param, i, j) for i in writers.get(param, ()))
                for param in sorted(unit.writes):
                    yield from (Conflict("WAR", param, i, j) for i in readers.get(param, ()))
                    yield from (Conflict("WAW", param, i, j) for i in writers.get(param, ()))
            if j in firsts:
                barriers += [j] * unit.is_barrier
                for param in unit.reads:
                    readers.setdefault(param, []).append(j)
                for param in unit.writes:
                    writers.setdefault(param, []).append(j)

    def needed_for(self, wanted: Collection[Param]) -> set[int]:
        """Units on which the final values of `wanted` depend: what must run when only these are asked for."""
        writers = Writers()
        for i, unit in enumerate(self.units):
            writers.add(i, unit)
        return self.ancestors({w for param in wanted for w in writers.of(param)})

    def ancestors(self, start: Collection[int]) -> set[int]:
        """`start` and every unit on which one of them depends, over true dependences."""
        writers, found = Writers(), set(start)
        sources: list[set[int]] = []
        for i, unit in enumerate(self.units):
            reads = writers.params() if unit.is_barrier else unit.reads
            sources.append({w for param in reads for w in writers.of(param)})
            writers.add(i, unit)
        for i in reversed(range(len(self.units))):
            if i in found:
                found |= sources[i]
        return found


class Spread:
    """Which parameters hold a value that comes from a growing set of units, while the order is walked."""

    def __init__(self) -> None:
        self._written: dict[Param, int] = {}  # latest write by the set
        self._covered: dict[Param, int] = {}  # latest certain write by another unit
        self._barrier = -1  # latest barrier in the set: it may have written anything
        self._live: set[Param] = set()

    def touches(self, unit: Unit) -> bool:
        if unit.is_barrier:
            return bool(self._live) or self._barrier >= 0
        return any(self.holds(param) for param in unit.reads)

    def holds(self, param: Param) -> bool:
        return max(self._written.get(param, -1), self._barrier) > self._covered.get(param, -1)

    def grow(self, i: int, unit: Unit) -> None:
        if unit.is_barrier:
            self._barrier = i
        self._written.update(dict.fromkeys(unit.writes, i))
        self._live |= unit.writes

    def cover(self, i: int, unit: Unit) -> None:
        self._covered.update(dict.fromkeys(unit.certain_writes, i))
        self._live -= unit.certain_writes


def same_branch(model: str, trained: str) -> bool:
    """Attribute paths of which one lies inside the other: `dit` and `dit.blocks.3`. An empty path is every model."""
    return not model or not trained or model == trained or model.startswith(f"{trained}.") or trained.startswith(f"{model}.")
