"""Why each unit is live or cached, for the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from flowrun.graph import Param, Unit, UnitGraph


def reasons(units: Sequence[Unit], live: Collection[int], needed: Collection[int], kept: Mapping[int, tuple[Param, ...]],
            trained: Collection[str]) -> dict[int, str]:
    """One short phrase per unit. Live units: what makes them so; cached ones: who needs what they return."""
    related = UnitGraph(units).related(trained)
    found: dict[int, str] = {}
    writer: dict[Param, int] = {}  # latest live unit that may write, or that reads, the parameter
    reader: dict[Param, int] = {}
    for i, unit in enumerate(units):
        if i not in live:
            found[i] = _cached(i, needed, kept)
            continue
        found[i] = _live(i, unit, units, i in related, writer, reader)
        writer.update(dict.fromkeys(unit.writes, i))
        reader.update(dict.fromkeys(unit.reads, i))
    return found


def _cached(i: int, needed: Collection[int], kept: Mapping[int, tuple[Param, ...]]) -> str:
    if i in kept:
        return "frozen: same result every epoch"
    return "frozen: a kept result depends on it" if i in needed else "not run: nothing reads what it returns"


def _live(i: int, unit: Unit, units: Sequence[Unit], related: bool, writer: Mapping[Param, int], reader: Mapping[Param, int]) -> str:
    if related:
        return f"calls {', '.join(unit.onload_model_names) or 'a trained model'}, which is trained"
    if unit.random == "per_epoch":
        return "draws anew each epoch"
    for param in sorted(unit.reads):
        if param in writer:
            return f"reads {_name(param)} of {units[writer[param]].name}"
    for param in sorted(unit.writes):
        if param in writer or param in reader:
            return f"updates {_name(param)} after {units[writer.get(param, reader.get(param))].name}"
    return "everything is live" if not unit.is_barrier else "may read anything of the live units before it"


def _name(param: Param) -> str:
    scope, name = param
    return name if scope == "shared" else f"{scope}.{name}"
