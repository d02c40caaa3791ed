"""From visits to batches: the one path on which split and unsplit training feed the loss.

Each row is a state of its own. Its live units run, the cached ones are replayed from their records, in the pipeline's
original order; then the names that the loss reads are stacked. Nothing here knows whether a cache is in use: with
splitter `none` every unit is live and there are no records. With no live unit at all there is nothing to replay: each
name is what one stored output holds, and is read straight into its batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowrun.batches import Visit
from flowrun.data import Row, Source
from flowrun.graph import Draws, Executor, Param, Record, State, Unit
from flowrun.graph.state import canonical
from flowrun.splitters import Split
from flowrun.variants import Variants


class Records(Protocol):
    """What the cached units returned, unit -> record, for each (row, variant)."""

    def records(self, visits: Sequence[tuple[int, int]]) -> Sequence[Mapping[int, Record]]: ...

    def stacked(self, visits: Sequence[tuple[int, int]], output: tuple[int, Param]) -> Tensor:
        """One stored output, (unit, parameter), of each visit: [B, ...]."""


class NoRecords:
    """Unsplit training: every unit is live."""

    def records(self, visits: Sequence[tuple[int, int]]) -> Sequence[Mapping[int, Record]]:
        return [{}] * len(visits)

    def stacked(self, visits: Sequence[tuple[int, int]], output: tuple[int, Param]) -> Tensor:
        raise LookupError(f"nothing is stored, so {output} is not")


class Feed:
    """Batches for the loss. executor: runs the split's units. names: what the loss reads, all in the shared scope.

    ragged: those among them whose length differs from row to row."""

    def __init__(
        self,
        rows: Sequence[Row],
        source: Source,
        split: Split,
        executor: Executor,
        records: Records,
        names: Sequence[str],
        ragged: Collection[str],
        variants: Variants,
        seed: int,
        device: torch.device,
    ) -> None:
        self.rows, self.source, self.split, self.executor = rows, source, split, executor
        self.store, self.names, self.seed, self.device = records, tuple(names), seed, device
        self.variants, self.ragged = variants, frozenset(ragged)
        self.wanted = live_inputs(split, names, source)
        self.stored = None if self.ragged & set(names) else stored_outputs(split, self.names)

    def batch(self, visits: Sequence[Visit]) -> dict[str, Tensor]:
        """Name -> [B, ...] on the device, B = len(visits)."""
        places = [
            (visit.row, self.variants.choose(self.seed, self.rows[visit.row].id, visit.epoch)) for visit in visits
        ]
        if self.stored is not None:
            return self._stacked(places)
        rows = [self.variants.row(self.rows[row], variant) for row, variant in places]
        jobs = [
            (
                State(shared=row_inputs(self.source, row, self.variants.change(variant), self.wanted)),
                Draws(self.seed, row.id, visit.epoch),
                kept,
            )
            for row, visit, (_, variant), kept in zip(rows, visits, places, self.store.records(places), strict=True)
        ]
        states = self.executor.run_batch(jobs, live=self.split.live)
        found = [state.shared for state in states]
        return collate(found, self.names, self.ragged, [row.id for row in rows], self.device)

    def _stacked(self, places: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        batch = {}
        for name, output in self.stored.items():
            try:
                batch[name] = self.store.stacked(places, output).to(self.device)
            except ValueError as error:
                rows = ", ".join(self.rows[row].id for row, _ in places)
                raise ValueError(f"{name} of {rows} cannot be a batch: {error}") from error
        return batch


def stored_outputs(split: Split, names: Sequence[str]) -> dict[str, tuple[int, Param]] | None:
    """Name -> the stored output that is its final value in every row; None unless there is one for each name.

    There is when no unit is live and the last that may write the name always does."""
    if split.live:
        return None
    found = {}
    for param in [("shared", name) for name in names]:
        writers = [i for i in split.needed if split.units[i].is_barrier or param in split.units[i].writes]
        if not writers or param not in split.units[writers[-1]].certain_writes:
            return None
        found[param[1]] = (writers[-1], param)
    return found


def live_inputs(split: Split, names: Sequence[str], source: Source) -> frozenset[str]:
    """Names of the data that a live unit or the loss may read (a superset: a cached unit may write them)."""
    return unit_inputs([split.units[i] for i in split.live], source) | set(names) & set(source.names)


def unit_inputs(units: Sequence[Unit], source: Source) -> frozenset[str]:
    """Names of the data that these units may read: all of them when one does not declare its effects."""
    if any(unit.is_barrier for unit in units):
        return frozenset(source.names)
    return frozenset(name for unit in units for scope, name in unit.reads if scope == "shared") & set(source.names)


def row_inputs(source: Source, row: Row, change: Mapping[str, Any], wanted: frozenset[str]) -> dict[str, Any]:
    """The data's names among `wanted` for one row as one variant sees it; a picture is decoded only when it is wanted.

    Tensors lie in memory as cached ones will: alignment alone changes the last bits of what is computed from them."""
    loaded = source.load(row, wanted - set(change)) if wanted - set(change) else {}
    given = {**loaded, **{name: value for name, value in change.items() if name in wanted}}
    return {name: canonical(value) for name, value in given.items()}


def collate(states: Sequence[Mapping[str, Any]], names: Sequence[str], ragged: Collection[str], rows: Sequence[str],
            device: torch.device) -> dict[str, Tensor]:  # fmt: skip
    """Stack each name over the rows: [B, ...]. `ragged` names are filled up with zeros behind the end: [B, L, ...].

    rows: their ids. Raises ValueError naming the rows when shapes differ."""
    batch = {}
    for name in names:
        values = [state[name] for state in states]
        if name in ragged:
            batch[name] = pad_sequence(values, batch_first=True).to(device)
            continue
        if len({value.shape for value in values}) > 1:
            shapes = ", ".join(f"{row}: {list(value.shape)}" for row, value in zip(rows, values, strict=True))
            raise ValueError(f"{name} differs in shape within a batch ({shapes})")
        batch[name] = torch.stack(values).to(device)
    return batch
