"""Running units on rows: the live ones are called, under guard; what the others returned is re-applied from records.

Both happen in the pipeline's original order, which is what makes a split run equal to an unsplit one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from flowrun.graph.calls import call_of, call_rows
from flowrun.graph.draws import Draws
from flowrun.graph.generators import GlobalGenerators
from flowrun.graph.graph import UnitGraph
from flowrun.graph.guard import Context, DeclaredModels, UndeclaredEffect, check_arguments
from flowrun.graph.state import Record, State, canonical
from flowrun.graph.unit import Unit
from flowrun.graph.watch import changed, watch

Job = tuple[State, Draws, Mapping[int, Record]]


class Executor:
    """models: by component name, loaded. configs: configuration of any component, also of those not loaded.

    trained: names of the trained models; gradients flow through the units that depend on them and through no other.
    autocast: entered around those units only; frozen ones compute as they do when they are cached. Dropout in those
    units is keyed like every draw, so it is the same in split and unsplit training.

    Raises UndeclaredEffect or ValueError for a process whose arguments are not its declared inputs."""

    def __init__(
        self,
        units: Sequence[Unit],
        models: Mapping[str, Any],
        configs: Mapping[str, Any] | None = None,
        trained: Collection[str] = (),
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.units = tuple(units)
        self.configs, self.autocast = configs or {}, autocast
        self.gradient_units = UnitGraph(units).gradient_units(trained)
        for unit in self.units:
            check_arguments(unit)
        self._models = [DeclaredModels(unit, models) for unit in self.units]
        self._calls = [call_of(unit) for unit in self.units]

    def run_unit(self, i: int, state: State, draws: Draws) -> Record:
        """Call one unit and write what it returns into `state`. Raises UndeclaredEffect; the unit's own errors pass."""
        unit, gradient = self.units[i], i in self.gradient_units
        inputs = watch(unit, state)
        context = Context(unit, self._models[i], self.configs, draws)
        with torch.set_grad_enabled(gradient):
            if gradient:
                with self.autocast(), draws.dropout(unit):
                    returned = self._calls[i](unit, context, state)
            else:
                returned = self._calls[i](unit, context, state)
            values = {param: canonical(value, gradient) for param, value in returned.values.items()}
        if (param := changed(inputs)) is not None:
            raise UndeclaredEffect(unit, f"changes its input {'.'.join(param)} in place", "return a new value instead")
        record = Record(values, returned.deleted)
        state.apply(record)
        return record

    def run(
        self,
        state: State,
        draws: Draws,
        live: Collection[int] | None = None,
        records: Mapping[int, Record] | None = None,
        made: dict[int, Record] | None = None,
    ) -> State:
        """Walk the order: run the live units (None: all), re-apply the records of others, pass over the rest.

        Changes `state` and returns it. made: gets the record of each unit that ran."""
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
        before, (state, draws, records), made = GlobalGenerators(), job, {}
        self.run(state.copy(), draws, live, records, made)
        if before.moved():
            self._name_culprit([job], live, before)
        return made

    def run_rows(self, jobs: Sequence[Job], live: Collection[int]) -> list[dict[int, Record]]:
        """`run_recorded` for several rows: units that can do them at once do, the others row by row."""
        before, states = GlobalGenerators(), [state.copy() for state, _, _ in jobs]
        made: list[dict[int, Record]] = [{} for _ in jobs]
        for i, unit in enumerate(self.units):
            if i not in live:
                for state, (_, _, records) in zip(states, jobs, strict=True):
                    if i in records:
                        state.apply(records[i])
            elif unit.process_rows is not None:
                for state, record, mine in zip(states, self._call_rows(i, states, jobs), made, strict=True):
                    state.apply(record)
                    mine[i] = record
            else:
                for state, (_, draws, _), mine in zip(states, jobs, made, strict=True):
                    mine[i] = self.run_unit(i, state, draws)
        if before.moved():
            self._name_culprit(jobs, live, before)
        return made

    def _call_rows(self, i: int, states: Sequence[State], jobs: Sequence[Job]) -> list[Record]:
        unit, inputs = self.units[i], [watch(self.units[i], state) for state in states]
        context = Context(unit, self._models[i], self.configs, jobs[0][1])
        with torch.no_grad():
            records = call_rows(unit, context, states)
        if any(changed(watched) is not None for watched in inputs):
            raise UndeclaredEffect(unit, "changes an input in place", "return a new value instead")
        return [Record({p: canonical(v, False) for p, v in record.values.items()}, record.deleted) for record in records]

    def run_batch(self, jobs: Sequence[Job], live: Collection[int] | None = None) -> list[State]:
        """`run` for several rows, on copies of their states.

        Raises UndeclaredEffect also for a draw from a global generator: comparing those costs more than a small unit,
        so it is done once around the rows, then unit by unit to name the culprit."""
        if live is not None and not live:
            return [self.run(state.copy(), draws, live, records) for state, draws, records in jobs]
        before = GlobalGenerators()
        states = [self.run(state.copy(), draws, live, records) for state, draws, records in jobs]
        if before.moved():
            self._name_culprit(jobs, live, before)
        return states

    def _name_culprit(self, jobs: Sequence[Job], live: Collection[int] | None, start: GlobalGenerators) -> None:
        """Run the rows again, from the generators' states at that time: the first unit that moves them is the one."""
        start.restore()
        for state, draws, records in jobs:
            state = state.copy()
            for i, unit in enumerate(self.units):
                if live is None or i in live:
                    self.run_unit(i, state, draws)
                elif i in records:
                    state.apply(records[i])
                if start.moved():
                    fix = "draw from ctx.generator and declare `random`"
                    raise UndeclaredEffect(unit, "draws from a global random generator", fix)
        raise RuntimeError("a global random generator changed while units ran, but not when each ran again alone")
