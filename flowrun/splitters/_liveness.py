"""Which returned values must be stored, and which cached units need not run at all. One pass each, backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flowrun.graph import Param, Unit, UnitGraph

EVERYTHING: Param = ("*", "*")  # whatever a barrier returned


class _Wanted:
    """The parameters whose present value is still read later: a set, or everything but a set."""

    def __init__(self, params: set[Param] | None) -> None:
        self.everything = params is None
        self.params: set[Param] = set(params or ())  # exceptions when everything is wanted

    def __contains__(self, param: Param) -> bool:
        return (param in self.params) != self.everything

    def __bool__(self) -> bool:
        return self.everything or bool(self.params)

    def add(self, params: Collection[Param]) -> None:
        (self.params.difference_update if self.everything else self.params.update)(params)

    def drop(self, params: Collection[Param]) -> None:
        (self.params.update if self.everything else self.params.difference_update)(params)


def kept_outputs(units: Sequence[Unit], live: Collection[int], wanted: set[Param] | None) -> dict[int, tuple[Param, ...]]:
    """Cached unit -> its outputs that a live unit, or the end, reads before a certain write replaces them."""
    later, kept = _Wanted(wanted), {}
    for i in reversed(range(len(units))):
        unit = units[i]
        if i not in live:
            params = [EVERYTHING] if unit.is_barrier and later else sorted(param for param in unit.writes if param in later)
            if params:
                kept[i] = tuple(params)
        later.drop(unit.certain_writes)
        if i in live and unit.is_barrier:
            later = _Wanted(None)
        elif i in live:
            later.add(unit.reads)
    return dict(sorted(kept.items()))


def required(units: Sequence[Unit], live: Collection[int], kept: Collection[int]) -> set[int]:
    """The cached units that keep something, and those on which they depend."""
    cached = [i for i in range(len(units)) if i not in live]
    found = UnitGraph([units[i] for i in cached]).ancestors({place for place, i in enumerate(cached) if i in kept})
    return {cached[place] for place in found}
