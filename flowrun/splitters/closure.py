"""The split of DiffSynth-Studio's two-stage training, to the letter of its published pseudo-code.

Names are flattened: a name is one parameter in whichever scope it lives. The operator is iterated until nothing is
added: forward reachability over edges from the most recent producer, then the updating chains of what the related units
consume. Its closure conditions do not imply that the split run equals the unsplit one, so `split` looks for conflicts.

Rounds add few units each and there can be many rounds, so each one looks only at what is new: linear over all of them.
"""

from __future__ import annotations

from flowrun.graph import Unit, UnitGraph
from flowrun.splitters import Splitter


class Closure(Splitter):
    sound = False

    def live(self, graph: UnitGraph, start: set[int]) -> set[int]:
        targets, updates = _edges(graph.units), _Updates(graph.units)
        related: set[int] = set()
        new = set(start)
        while new:
            new = _forward_reachable(targets, new, related)
            related |= new
            new = updates.after(new) - related
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


def _forward_reachable(targets: dict[int, set[int]], start: set[int], related: set[int]) -> set[int]:
    """`start` and what is reached from it, as far as it is not related already."""
    found, todo = set(start), list(start)
    while todo:
        new = targets.get(todo.pop(), set()) - found - related
        found |= new
        todo += new
    return found


class _Updates:
    """For each name, the related unit that consumes it first; if that unit updates it too, all later updates follow."""

    def __init__(self, units: tuple[Unit, ...]) -> None:
        self._units = units
        self._chains: dict[str, list[int]] = {}  # name -> the units that produce it, in execution order
        self._places: list[dict[str, int]] = []  # per unit: name -> its place in the chain
        for i, unit in enumerate(units):
            chains = {name: self._chains.setdefault(name, []) for name in unit.output_params}
            self._places.append({name: len(chain) for name, chain in chains.items()})
            for chain in chains.values():
                chain.append(i)
        self._first: dict[str, int] = {}
        self._followed: dict[str, int] = {}  # from this place on, the chain has been given out

    def after(self, new: set[int]) -> set[int]:
        """Updates that follow now that `new` units are related too, those given out before left out."""
        earlier: set[str] = set()
        for i in new:
            for name in _inputs(self._units[i]):
                if i < self._first.get(name, len(self._units)):
                    self._first[name] = i
                    earlier.add(name)
        found: set[int] = set()
        for name in earlier:
            place = self._places[self._first[name]].get(name)
            if place is not None:
                chain = self._chains[name]
                found.update(chain[place + 1 : self._followed.get(name, len(chain))])
                self._followed[name] = place + 1
        return found
