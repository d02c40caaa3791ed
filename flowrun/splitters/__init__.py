"""A splitter says which units are live (run at every training step) and which are cached (run once, stored).

A new splitter is one module here with one subclass of `Splitter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flowrun.config import ConfigError
from flowrun.graph import EVERYTHING, SCOPES, Conflict, Param, Unit, UnitGraph
from flowrun.graph.conflict import conflicts
from flowrun.registry import SPLITTERS
from flowrun.splitters._liveness import kept_outputs
from flowrun.splitters._reasons import reasons


class Splitter(ABC):
    """sound: for every list of units, a split by it computes what the unsplit run computes. why: the reason given for
    a live unit that neither uses a trained model nor draws anew; empty: found unit by unit."""

    sound: bool = True
    why: str = ""

    @abstractmethod
    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        """Indices of the live units. start: those that must be: they call a trained model or draw anew each epoch."""


@dataclass(frozen=True)
class Split:
    """Indices are places in `units`.

    live, cached: a partition. needed: the cached units that have to run at all, since something kept depends on them.
    kept: cached unit -> the parameters of it that are stored. frontier: all of those; a barrier's are EVERYTHING.
    models_cached, models_live: components whose weights each stage calls from units. hazards: conflicts that a splitter
    left standing (closure only). why: a reason for each unit, in English.
    """

    units: tuple[Unit, ...]
    live: tuple[int, ...]
    cached: tuple[int, ...]
    needed: tuple[int, ...]
    kept: dict[int, tuple[Param, ...]]
    frontier: tuple[Param, ...]
    models_cached: tuple[str, ...]
    models_live: tuple[str, ...]
    hazards: tuple[Conflict, ...]
    why: dict[int, str]


def split(
    name: str,
    units: Sequence[Unit],
    trained: Collection[str],
    live_out: Collection[str | Param] | None = None,
    on_hazard: str = "refuse",
) -> Split:
    """Split `units` for training the models `trained` (full or LoRA; attribute paths such as "dit.blocks.3" count).

    name: none, closure, ordered, replay, or pkg.module:Class. live_out: what is read after the last unit, a bare name
    in the shared scope, else (scope, name); None: everything. on_hazard: refuse | report (Split.hazards).

    Raises ConfigError for an unknown splitter, and under `refuse` for a split that would not equal the unsplit run;
    TypeError and ValueError for wrong arguments."""
    splitter = SPLITTERS.find(name, "task.splitter")()
    if on_hazard not in ("refuse", "report"):
        raise ValueError(f"on_hazard is {on_hazard!r}; refuse or report")
    wanted, graph = _params(live_out), UnitGraph(units)
    start = graph.related(trained) | {i for i, unit in enumerate(graph.units) if unit.random == "per_epoch"}
    live = splitter.live(graph, start)
    found = () if splitter.sound else conflicts(graph.units, live, set(range(len(graph.units))) - live)
    if on_hazard == "refuse":
        for conflict in found:
            raise _refusal(name, graph.units, conflict)
    kept = kept_outputs(graph.units, live, wanted)
    needed = _required(graph.units, live, kept)
    return Split(
        units=graph.units,
        live=tuple(sorted(live)),
        cached=tuple(i for i in range(len(graph.units)) if i not in live),
        needed=tuple(sorted(needed)),
        kept=kept,
        frontier=tuple(sorted({param for params in kept.values() for param in params})),
        models_cached=_components(graph.units, needed),
        models_live=_components(graph.units, live),
        hazards=tuple(found),
        why=reasons(graph.units, live, needed, kept, trained, splitter.why),
    )


def _params(live_out: Collection[str | Param] | None) -> set[Param] | None:
    if live_out is None:
        return None
    if isinstance(live_out, str):
        raise TypeError(f"live_out is the text {live_out!r}; give a collection of names: [{live_out!r}]")
    params = {("shared", item) if isinstance(item, str) else tuple(item) for item in live_out}
    for param in params:
        if len(param) != 2 or param[0] not in SCOPES:
            raise ValueError(f"live_out holds {param}; give names or pairs (scope, name), scopes: {', '.join(SCOPES)}")
    return params


def _required(units: Sequence[Unit], live: Collection[int], kept: Collection[int]) -> set[int]:
    """The cached units that keep something, and those on which they depend."""
    cached = [i for i in range(len(units)) if i not in live]
    roots = {place for place, i in enumerate(cached) if i in kept}
    return {cached[place] for place in UnitGraph([units[i] for i in cached]).needed_for((), roots)}


def _components(units: Sequence[Unit], chosen: Collection[int]) -> tuple[str, ...]:
    """First parts of the models' attribute paths; an empty path, every model, stays as it is."""
    return tuple(sorted({model.partition(".")[0] for i in chosen for model in units[i].onload_model_names}))


def _refusal(name: str, units: Sequence[Unit], conflict: Conflict) -> ConfigError:
    first, second = units[conflict.first].name, units[conflict.second].name
    param = "what it does not declare" if conflict.param == EVERYTHING else ".".join(conflict.param)
    story = {
        "RAW": f"reads {param}, which the live unit {first} writes",
        "WAR": f"writes {param} after the live unit {first} has read it",
        "WAW": f"writes {param} after the live unit {first} has written it",
    }[conflict.kind]
    what = f"{name} would cache the unit {second}, which {story} ({conflict.kind}), and the split run would differ"
    return ConfigError("task.splitter", what, "use task.splitter=replay")


__all__ = ["EVERYTHING", "Split", "Splitter", "split"]
