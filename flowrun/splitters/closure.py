"""The split of DiffSynth-Studio's two-stage training, to the letter of its published pseudo-code.

Names are flattened: a name is one parameter in whichever scope it lives. The operator is iterated until nothing is added:
forward reachability over edges from the most recent producer, then the updating chains of what the related units consume.
Its two closure conditions do not imply that the split run equals the unsplit one, so `split` looks for conflicts after it.
"""

from __future__ import annotations

from collections.abc import Iterable

from flowrun.graph import Unit, UnitGraph
from flowrun.splitters import Splitter


class Closure(Splitter):
    sound = False

    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        targets, chains = _edges(graph.units), _chains(graph.units)
        related, frontier = set(start), set(start)
        while frontier:
            related |= _forward_reachable(targets, frontier)
            frontier = _updating_units(graph.units, chains, related)
            related |= frontier
        return related


def _inputs(unit: Unit) -> list[str]:
    return [*unit.input_params, *unit.input_params_posi.values(), *unit.input_params_nega.values()]


def _edges(units: tuple[Unit, ...]) -> dict[int, set[int]]:
    """Unit -> the units that consume what it was the most recent producer of."""
    producer: dict[str, int] = {}
    targets: dict[int, set[int]] = {}
    for i, unit in enumerate(units):
        for name in _inputs(unit):
            if name in producer:
                targets.setdefault(producer[name], set()).add(i)
        producer.update(dict.fromkeys(unit.output_params, i))
    return targets


def _chains(units: tuple[Unit, ...]) -> dict[str, list[int]]:
    """Name -> the units that produce it, in execution order."""
    chains: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        for name in dict.fromkeys(unit.output_params):
            chains.setdefault(name, []).append(i)
    return chains


def _forward_reachable(targets: dict[int, set[int]], start: Iterable[int]) -> set[int]:
    found, todo = set(start), list(start)
    while todo:
        new = targets.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def _updating_units(units: tuple[Unit, ...], chains: dict[str, list[int]], related: set[int]) -> set[int]:
    """Units not yet related that update a name after the related unit which consumes it first, if that one updates it too."""
    first_consumer: dict[str, int] = {}
    for i in sorted(related):
        for name in _inputs(units[i]):
            first_consumer.setdefault(name, i)
    found: set[int] = set()
    for name, first in first_consumer.items():
        chain = chains.get(name, [])
        if first in chain:
            found.update(chain[chain.index(first) + 1 :])
    return found - related
