"""From visits to batches: the one path on which split and unsplit training feed the loss.

Each row is a state of its own. Its live units run, the cached ones are replayed from their records, in the pipeline's
original order; then the names that the loss reads are stacked. Nothing here knows whether a cache is in use: with
splitter `none` every unit is live and there are no records. With no live unit at all there is nothing to replay: each
name is what one stored output holds, and is read straight into its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flowrun.algorithms import Algorithm
from flowrun.batches import Visit
from flowrun.data import Row, Source
from flowrun.graph import Draws, Executor, Param, Record, State
from flowrun.splitters import Split


class Records(Protocol):
    """What the cached units returned, unit -> record, for each (row, variant of the algorithm)."""

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
    """Batches for the loss. executor: runs the split's units. names: what the loss reads, all in the shared scope."""

    def __init__(
        self,
        rows: Sequence[Row],
        source: Source,
        split: Split,
        executor: Executor,
        records: Records,
        names: Sequence[str],
        algorithm: Algorithm,
        seed: int,
        device: torch.device,
    ) -> None:
        self.rows, self.source, self.split, self.executor = rows, source, split, executor
        self.store, self.names, self.seed, self.device = records, tuple(names), seed, device
        self.algorithm, self.variants = algorithm, algorithm.variants()
        self.wanted = live_inputs(split, names) & set(source.names)
        self.stored = stored_outputs(split, self.names)

    def batch(self, visits: Sequence[Visit]) -> dict[str, Tensor]:
        """Name -> [B, ...] on the device, B = len(visits)."""
        rows = [self.rows[visit.row] for visit in visits]
        variants = [
            self.algorithm.choose(self.seed, row.id, visit.epoch) for row, visit in zip(rows, visits, strict=True)
        ]
        places = [(visit.row, variant) for visit, variant in zip(visits, variants, strict=True)]
        if self.stored is not None:
            return {name: self._stacked(rows, places, name).to(self.device) for name in self.names}
        jobs = [
            (
                State(shared=row_inputs(self.source, row, self.variants[variant], self.wanted)),
                Draws(self.seed, row.id, visit.epoch),
                kept,
            )
            for row, visit, variant, kept in zip(rows, visits, variants, self.store.records(places), strict=True)
        ]
        states = self.executor.run_batch(jobs, live=self.split.live)
        return collate([state.shared for state in states], self.names, [row.id for row in rows], self.device)

    def _variant(self, row: Row, visit: Visit) -> int:
        return self.algorithm.choose(self.seed, row.id, visit.epoch) if len(self.variants) > 1 else 0

    def _stacked(self, rows: Sequence[Row], places: Sequence[tuple[int, int]], name: str) -> Tensor:
        try:
            return self.store.stacked(places, self.stored[name])
        except ValueError as error:
            raise ValueError(f"{name} of {', '.join(row.id for row in rows)}: {error}") from error


def stored_outputs(split: Split, names: Sequence[str]) -> dict[str, tuple[int, Param]] | None:
    """Name -> the stored output that is its final value in every row; None unless there is one for each name.

    There is when no unit is live and the last that may write the name always does."""
    found = {}
    for param in [("shared", name) for name in names]:
        last = next(
            (i for i in reversed(split.needed) if split.units[i].is_barrier or param in split.units[i].writes), None
        )
        if (
            split.live
            or last is None
            or param not in split.units[last].certain_writes
            or param not in split.kept.get(last, ())
        ):
            return None
        found[param[1]] = (last, param)
    return found


def live_inputs(split: Split, names: Sequence[str]) -> frozenset[str]:
    """Shared names that a live unit or the loss may take from the data itself (a superset: a cached unit may write them)."""
    live = [split.units[i] for i in split.live]
    if any(unit.is_barrier for unit in live):
        raise ValueError("a live unit without declared effects may read any input; declare what it reads")
    return frozenset(names) | {name for unit in live for scope, name in unit.reads if scope == "shared"}


def row_inputs(source: Source, row: Row, change: Mapping[str, Any], wanted: frozenset[str]) -> dict[str, Any]:
    """The data's names among `wanted` for one row as one variant sees it; a picture is decoded only when it is wanted."""
    loaded = source.load(row, wanted - set(change)) if wanted - set(change) else {}
    return {**loaded, **{name: value for name, value in change.items() if name in wanted}}


def collate(
    states: Sequence[Mapping[str, Any]], names: Sequence[str], rows: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """Stack each name over the rows: [B, ...]. Raises ValueError naming the rows when shapes differ."""
    batch = {}
    for name in names:
        values = [state[name] for state in states]
        if len({value.shape for value in values}) > 1:
            shapes = ", ".join(f"{row}: {list(value.shape)}" for row, value in zip(rows, values, strict=True))
            raise ValueError(f"{name} differs in shape within a batch ({shapes})")
        batch[name] = torch.stack(values).to(device)
    return batch
