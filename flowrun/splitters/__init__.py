"""A splitter says which units are live (run at every training step) and which are cached (run once, stored).

A new splitter is one module here with one subclass of `Splitter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flowrun.config import ConfigError
from flowrun.graph import Conflict, Param, Unit, UnitGraph
from flowrun.registry import SPLITTERS
from flowrun.splitters._liveness import EVERYTHING, kept_outputs, required
from flowrun.splitters._reasons import reasons


class Splitter(ABC):
    """`sound`: for every list of units, a split by it computes what the unsplit run computes."""

    sound: bool = True

    @abstractmethod
    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        """Indices of the live units. start: those that must be: they call a trained model or draw anew each epoch."""


@dataclass(frozen=True)
class Split:
    """Indices are places in `units`.

    live, cached: a partition. needed: the cached units that have to run at all, since something kept depends on them.
    kept: cached unit -> the parameters of it that are stored. frontier: all of those; a barrier's are ("*", "*").
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


def split(name: str, units: Sequence[Unit], trained: Collection[str], live_out: Collection[str | Param] | None = None,
          on_hazard: str = "refuse") -> Split:
    """Split `units` for training the models `trained` (full or LoRA; attribute paths such as "dit.blocks.3" count).

    name: none, closure, ordered, replay, or pkg.module:Class. live_out: what is read after the last unit, a bare name in
    the shared scope, else (scope, name); None: everything. on_hazard: refuse | report (Split.hazards).

    Raises ConfigError for an unknown splitter, and under `refuse` for a split that would not equal the unsplit run."""
    splitter = SPLITTERS.find(name, "task.splitter")()
    if on_hazard not in ("refuse", "report"):
        raise ValueError(f"on_hazard is {on_hazard!r}; refuse or report")
    graph = UnitGraph(units)
    start = graph.related(trained) | {i for i, unit in enumerate(units) if unit.random == "per_epoch"}
    live = splitter.live(graph, start)
    hazards = () if splitter.sound else tuple(graph.conflicts_between(live, set(range(len(units))) - live))
    if hazards and on_hazard == "refuse":
        raise _refusal(name, graph, hazards)
    wanted = None if live_out is None else {("shared", item) if isinstance(item, str) else tuple(item) for item in live_out}
    return _describe(graph, live, wanted, trained, hazards)


def _describe(graph: UnitGraph, live: set[int], wanted: set[Param] | None, trained: Collection[str], hazards: tuple[Conflict, ...]) -> Split:
    units = graph.units
    kept = kept_outputs(units, live, wanted)
    needed = required(units, live, kept)
    return Split(
        units=units,
        live=tuple(sorted(live)),
        cached=tuple(i for i in range(len(units)) if i not in live),
        needed=tuple(sorted(needed)),
        kept=kept,
        frontier=tuple(sorted({param for params in kept.values() for param in params})),
        models_cached=_components(units, needed),
        models_live=_components(units, live),
        hazards=hazards,
        why=reasons(units, live, needed, kept, trained),
    )


def _components(units: Sequence[Unit], chosen: Collection[int]) -> tuple[str, ...]:
    """First parts of the models' attribute paths; an empty path, every model, stays as it is."""
    return tuple(sorted({model.partition(".")[0] for i in chosen for model in units[i].onload_model_names}))


def _refusal(name: str, graph: UnitGraph, hazards: tuple[Conflict, ...]) -> ConfigError:
    kinds = {"RAW": "reads {p}, which {a} writes", "WAR": "writes {p} after {a} has read it", "WAW": "writes {p} after {a} has written it"}
    first, second = (graph.units[i].name for i in (hazards[0].first, hazards[0].second))
    story = kinds[hazards[0].kind].format(p=".".join(hazards[0].param), a=f"the live unit {first}")
    more = f" (and {len(hazards) - 1} more conflicts)" if len(hazards) > 1 else ""
    what = f"{name} would cache the unit {second}, which {story} ({hazards[0].kind}){more}: the split run would differ"
    return ConfigError("task.splitter", what, "use task.splitter=replay")


__all__ = ["EVERYTHING", "Split", "Splitter", "split"]
