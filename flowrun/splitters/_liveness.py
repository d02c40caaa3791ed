"""Which returned values must be stored: one pass backward, like liveness in a compiler."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flowrun.graph import EVERYTHING, Param, Unit
from flowrun.graph.wanted import Wanted


def kept_outputs(
    units: Sequence[Unit], live: Collection[int], wanted: set[Param] | None
) -> dict[int, tuple[Param, ...]]:
    """Cached unit -> its outputs that a live unit, or the end, reads before a certain write replaces them.

    wanted: read at the end; None: everything."""
    later, kept = Wanted(wanted), {}
    for i in reversed(range(len(units))):
        unit = units[i]
        if i in live:
            later.before(unit)
            continue
        params = [EVERYTHING] if unit.is_barrier and later else later.outputs(unit)
        if params:
            kept[i] = tuple(params)
        later.replaced_by(unit)
    return dict(sorted(kept.items()))
