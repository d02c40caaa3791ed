"""Why each unit is live or cached, for the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from flowrun.graph import EVERYTHING, Param, Unit
from flowrun.graph.graph import trained_models
from flowrun.graph.unit import param_name


def reasons(
    units: Sequence[Unit],
    live: Collection[int],
    needed: Collection[int],
    kept: Mapping[int, tuple[Param, ...]],
    trained: Collection[str],
    general: str,
) -> dict[int, str]:
    """One short phrase per unit. general: said of live units that are not so in every split; empty: found here."""
    found = _live(units, live, trained, general) | _cached(units, live, needed, kept)
    return {i: found[i] for i in range(len(units))}


def _live(units: Sequence[Unit], live: Collection[int], trained: Collection[str], general: str) -> dict[int, str]:
    """What makes each live unit so."""
    found: dict[int, str] = {}
    writer: dict[Param, int] = {}  # latest live unit that may have written the parameter's present value
    toucher: dict[Param, str] = {}  # what the latest live unit did with it
    barrier: int | None = None  # latest live unit that may have written anything
    for i, unit in enumerate(units):
        if i not in live:
            for param in unit.certain_writes:
                writer.pop(param, None)
            continue
        source = next((param for param in sorted(unit.reads) if param in writer), None)
        update = next((param for param in sorted(unit.writes) if param in toucher), None)
        if models := trained_models(unit, trained):
            found[i] = f"uses trained model {', '.join(model or 'of any name' for model in models)}"
        elif unit.random == "per_epoch":
            found[i] = "draws anew each epoch"
        elif general:
            found[i] = general
        elif source:
            found[i] = f"reads {param_name(source)} of {units[writer[source]].name}"
        elif update:
            found[i] = f"writes {param_name(update)} after {toucher[update]}"
        elif barrier is not None:
            found[i] = f"comes after {units[barrier].name}, which may write anything"
        elif unit.is_barrier:
            found[i] = "may read anything of the live units before it"
        else:
            found[i] = "live by the splitter's own rule"
        barrier = i if unit.is_barrier else barrier
        writer.update(dict.fromkeys(unit.writes, i))
        toucher.update(dict.fromkeys(unit.reads, f"{unit.name} has read it"))
        toucher.update(dict.fromkeys(unit.writes, f"{unit.name} has written it"))
    return found


def _cached(
    units: Sequence[Unit], live: Collection[int], needed: Collection[int], kept: Mapping[int, tuple[Param, ...]]
) -> dict[int, str]:
    """Who needs what each cached unit returns."""
    found: dict[int, str] = {}
    live_reader, cached_reader = _NextReader(), _NextReader()
    for i in reversed(range(len(units))):
        unit = units[i]
        if i in live:
            live_reader.add(unit)
            continue
        if i in kept:
            reader = next((name for param in kept[i] if (name := live_reader.of(param))), "the loss")
            found[i] = f"frozen: needed by {reader}"
        elif i in needed:
            reader = next((name for param in sorted(unit.writes) if (name := cached_reader.of(param))), "cached units")
            found[i] = f"frozen: needed by {reader}"
        else:
            found[i] = "its outputs are never read"
        if i in needed:
            cached_reader.add(unit)
    return found


class _NextReader:
    """Walking backward: the next unit that reads a parameter."""

    def __init__(self) -> None:
        self._of: dict[Param, str] = {}
        self._any = ""  # reads everything

    def of(self, param: Param) -> str:
        return self._of.get(param) or self._any or ("live units" if param == EVERYTHING and self._of else "")

    def add(self, unit: Unit) -> None:
        for param in unit.certain_writes:
            self._of.pop(param, None)
        self._of.update(dict.fromkeys(unit.reads, unit.name))
        if unit.is_barrier:
            self._any = unit.name
