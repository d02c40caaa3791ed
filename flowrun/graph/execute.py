"""Running units on rows: the live ones are called, under guard; what the others returned is re-applied from records.

Both happen in the pipeline's original order, which is what makes a split run equal to an unsplit one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from flowrun.graph.draws import Draws
from flowrun.graph.graph import UnitGraph
from flowrun.graph.guard import (
    Context,
    DeclaredScope,
    UndeclaredEffect,
    check_returned,
    check_versions,
    global_generators,
    versions,
)
from flowrun.graph.state import Record, State, canonical
from flowrun.graph.unit import SCOPES, Param, Unit

Job = tuple[State, Draws, Mapping[int, Record]]


class Executor:
    """models: by component name, loaded. configs: configuration of any component, also of those not loaded.

    trained: names of the trained models; gradients flow through the units that depend on them and through no other.
    autocast: entered around those units only; frozen ones compute as they do when they are cached."""

    def __init__(self, units: Sequence[Unit], models: Mapping[str, Any], configs: Mapping[str, Any] | None = None,
                 trained: Collection[str] = (), autocast: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self.units = tuple(units)
        self.models, self.configs, self.autocast = models, configs or {}, autocast
        self.gradient_units = UnitGraph(units).gradient_units(trained)

    def run_unit(self, i: int, state: State, draws: Draws) -> Record:
        """Call one unit and write what it returns into `state`. Raises UndeclaredEffect; the unit's own errors pass."""
        unit = self.units[i]
        before = versions(state, unit)
        context = Context(unit, self.models, self.configs, draws)
        gradient = i in self.gradient_units
        with torch.set_grad_enabled(gradient), self.autocast() if gradient else nullcontext():
            call = _take_over if unit.take_over else _both_sides if unit.separate_cfg else _shared
            record = call(unit, context, state)
            record = Record({param: canonical(value) for param, value in record.values.items()}, record.deleted)
        check_versions(unit, before)
        state.apply(record)
        return record

    def run(self, state: State, draws: Draws, live: Collection[int] | None = None,
            records: Mapping[int, Record] | None = None, made: dict[int, Record] | None = None) -> State:
        """Walk the order: run the live units (None: all), re-apply the records of others, pass over the rest. Changes `state`.

        made: gets the record of each unit that ran."""
        for i in range(len(self.units)):
            if live is None or i in live:
                record = self.run_unit(i, state, draws)
                if made is not None:
                    made[i] = record
            elif records and i in records:
                state.apply(records[i])
        return state

    def run_recorded(self, job: Job, live: Collection[int]) -> dict[int, Record]:
        """What each live unit returned for one row, checked like `run_batch`."""
        before, (state, draws, records), made = global_generators(), job, {}
        self.run(state.copy(), draws, live, records, made)
        if global_generators() != before:
            self._name_culprit([job], live)
        return made

    def run_batch(self, jobs: Sequence[Job], live: Collection[int] | None = None) -> list[State]:
        """`run` for several rows, on copies of their states. Raises UndeclaredEffect also for a draw from a global generator:
        comparing those costs more than a small unit, so it is done once around the rows, then unit by unit to name the culprit."""
        if live is not None and not live:
            return [self.run(state.copy(), draws, live, records) for state, draws, records in jobs]
        before = global_generators()
        states = [self.run(state.copy(), draws, live, records) for state, draws, records in jobs]
        if global_generators() != before:
            self._name_culprit(jobs, live)
        return states

    def _name_culprit(self, jobs: Sequence[Job], live: Collection[int] | None) -> None:
        for state, draws, records in jobs:
            state = state.copy()
            for i, unit in enumerate(self.units):
                before = global_generators()
                if live is None or i in live:
                    self.run_unit(i, state, draws)
                elif i in records:
                    state.apply(records[i])
                if global_generators() != before:
                    raise UndeclaredEffect(unit, "draws from a global random generator", "draw from ctx.generator and declare `random`")
        raise RuntimeError("a global random generator changed while units ran, but none of them changes it when run again alone")


def _shared(unit: Unit, context: Context, state: State) -> Record:
    inputs = {name: state.shared[name] for name in unit.input_params if name in state.shared}
    inputs |= _side(unit.input_params_posi, state.posi) | _side(unit.input_params_nega, state.nega)
    returned = check_returned(unit, unit.process(context, **inputs))
    return Record({("shared", name): value for name, value in returned.items()})


def _both_sides(unit: Unit, context: Context, state: State) -> Record:
    values: dict[Param, Any] = {}
    shared = {name: state.shared[name] for name in unit.input_params if name in state.shared}
    for scope, names, side in (("posi", unit.input_params_posi, state.posi), ("nega", unit.input_params_nega, state.nega)):
        returned = check_returned(unit, unit.process(context, **shared, **_side(names, side)))
        values |= {(scope, name): value for name, value in returned.items()}
    return Record(values)


def _take_over(unit: Unit, context: Context, state: State) -> Record:
    """What is returned counts as written, what was seen, may be written and is missing counts as deleted."""
    seen = {s: dict(getattr(state, s)) if unit.is_barrier else DeclaredScope(unit, s, getattr(state, s)) for s in SCOPES}
    before = {s: dict(values) for s, values in seen.items()}
    returned = unit.process(context, **seen)
    if not isinstance(returned, (tuple, list)) or len(returned) != len(SCOPES):
        raise UndeclaredEffect(unit, "does not return three mappings", "a take_over unit returns (shared, posi, nega)")
    values: dict[Param, Any] = {}
    deleted: set[Param] = set()
    for scope, after in zip(SCOPES, returned, strict=True):
        values |= {(scope, n): v for n, v in after.items() if _is_write(unit, scope, n, v, before[scope])}
        gone = [n for n in set(before[scope]).difference(after) if (unit.is_barrier or n in unit.output_params)]
        deleted |= {(scope, n) for n in gone}
    return Record(values, frozenset(deleted))


def _is_write(unit: Unit, scope: str, name: str, value: Any, before: Mapping[str, Any]) -> bool:
    if unit.is_barrier or name in unit.output_params:
        return True
    if name in before and before[name] is value:
        return False  # an input handed back as it came
    raise UndeclaredEffect(unit, f"writes {scope}.{name}", f"add {name!r} to output_params, which has {list(unit.output_params)}")


def _side(names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {argument: values[name] for argument, name in names.items() if name in values}
