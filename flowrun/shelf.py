"""The keys of one list of rows: what each value is addressed by, what has to run for those that are missing.

A place is a row in one variant: row * len(variants) + variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from torch import Tensor

from flowrun.cache.key import KEY_BYTES, digest
from flowrun.cache.keyplan import KeyPlan, Output
from flowrun.cache.manifest import Kept, ManifestRow
from flowrun.cache.reader import Reader
from flowrun.cache.store import Store
from flowrun.data import Row, Source
from flowrun.files import HashFile
from flowrun.graph import EVERYTHING, Param, UnitGraph
from flowrun.remembered import Remembered
from flowrun.splitters import Split
from flowrun.variants import Variants

AT_ONCE = 4096  # rows whose keys are made together: quick, and never all that leads to the keys of a large list in memory


@dataclass(frozen=True)
class Job:
    """One row in one variant, of which some outputs are missing. units: what has to run for them, in order."""

    shelf: Shelf
    place: int
    units: tuple[int, ...]

    @property
    def row(self) -> Row:
        """As the variant sees it."""
        row, variant = divmod(self.place, len(self.shelf.variants))
        return self.shelf.variants.row(self.shelf.rows[row], variant)

    @property
    def shape(self) -> tuple[int, ...]:
        """The row's, the same in all variants."""
        return self.shelf.rows[self.place // len(self.shelf.variants)].shape

    @property
    def change(self) -> Mapping[str, Any]:
        return self.shelf.variants.change(self.place % len(self.shelf.variants))


class Shelf:
    """Keys of one list of rows under one split."""

    def __init__(
        self,
        split: Split,
        source: Source,
        rows: Sequence[Row],
        variants: Variants,
        plan: KeyPlan,
        hash_file: HashFile,
        store: Store,
    ) -> None:
        self.split, self.source, self.rows, self.variants = split, source, rows, variants
        self.outputs: list[Output] = list(plan.outputs)
        self._keys: list[bytes] = []
        self._stamps: list[bytes] = []
        for start in range(0, len(rows), AT_ONCE):
            self._add(rows[start : start + AT_ONCE], plan, hash_file)
        self.reader = Reader(store, split.units, lambda row, variant: self.keys(row * len(variants) + variant))

    def _add(self, rows: Sequence[Row], plan: KeyPlan, hash_file: HashFile) -> None:
        """The keys of these rows, after those of the rows before."""
        source, count = self.source, range(len(self.variants))
        if isinstance(source, Remembered):
            self._stamps += map(source.stamp, rows)
            self._keys += [b"".join(source.keys(row, n, self.outputs, self.split.units)) for row in rows for n in count]
            return
        seen = [[source.fingerprints(source.variant(row, n), hash_file) for n in range(source.variants)] for row in rows]
        self._stamps += [digest(*of_row) for of_row in seen]
        for _, alike in groupby(zip(rows, seen, strict=True), lambda pair: [list(given) for given in pair[1]]):
            ids, of_ids = zip(*((row.id, of_row) for row, of_row in alike), strict=True)
            by_variant = [keys for given in zip(*of_ids, strict=True) for keys in self._by_change(plan, ids, given)]
            self._keys += [keys for of_row in zip(*by_variant, strict=True) for keys in of_row]

    def _by_change(self, plan: KeyPlan, ids: Sequence[str], given: Sequence[Mapping[str, bytes]]) -> Iterator[list[bytes]]:
        """For each of the algorithm's changes, the keys of each row, joined. given: what one variant of the data gives each row."""
        inputs, columns = {("shared", name): [of_row[name] for of_row in given] for name in given[0]}, []
        for change in self.variants.changes:
            changed = {("shared", name): [digest(name, value)] * len(ids) for name, value in change.items()}
            columns = plan.columns({**inputs, **changed}, ids, columns)
            yield [b"".join(columns[place][n] for place in plan.outputs.values()) for n in range(len(ids))]

    def keys(self, place: int) -> dict[Output, bytes]:
        return dict(zip(self.outputs, self._cut(self._keys[place]), strict=True))

    def each(self) -> Iterator[list[bytes]]:
        """The keys of each place, in the order of `outputs`."""
        return map(self._cut, self._keys)

    def _cut(self, joined: bytes) -> list[bytes]:
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]

    def stamp(self, number: int) -> bytes:
        """Of everything that a row's inputs come from; the same when only the cache is left of them."""
        return self._stamps[number]

    def manifest_row(self, number: int, fault: str) -> ManifestRow:
        row, count = self.rows[number], len(self.variants)
        keys = (
            {}
            if fault
            else {
                Kept(variant, self.split.units[u].name, *param): key
                for variant in range(count)
                for (u, param), key in self.keys(number * count + variant).items()
            }
        )
        return ManifestRow(row.id, row.prompt, row.size, self.stamp(number), fault, keys, row.frames)

    def places(self) -> range:
        return range(len(self._keys))

    def stacked(self, visits: Sequence[tuple[int, int]], output: Output) -> Tensor:
        start = self.outputs.index(output) * KEY_BYTES
        keys = [self._keys[row * len(self.variants) + variant][start : start + KEY_BYTES] for row, variant in visits]
        return self.reader.stacked(keys)

    def jobs(self, missing: set[bytes]) -> list[Job]:
        """What to run so that no key of this shelf is missing; a value that several rows share is made once."""
        found, left = [], set(missing)
        for place, keys in enumerate(self.each()) if missing else ():
            lacking = tuple(key in left for key in keys)
            if any(lacking):
                left.difference_update(keys)
                found.append(Job(self, place, self._to_run(lacking, tuple(key not in missing for key in keys))))
        return found

    @cached_property
    def _edges(self) -> list[tuple[int, int, Param]]:
        """(writer, reader, what) of the split's units, the last readers first."""
        return sorted(UnitGraph(self.split.units).edges, key=lambda edge: -edge[1])

    @lru_cache(maxsize=1024)  # noqa: B019 - few different ones, and as many shelves as a run has lists of rows
    def _to_run(self, lacking: tuple[bool, ...], there: tuple[bool, ...]) -> tuple[int, ...]:
        """Units that make the lacking outputs, and those whose results they read and that are not stored themselves.

        lacking, there: of each of `outputs`."""
        run = {unit for (unit, _), lacks in zip(self.outputs, lacking, strict=True) if lacks}
        present = {output for output, is_there in zip(self.outputs, there, strict=True) if is_there}
        for writer, reader, param in self._edges:
            if reader in run and writer in self.split.needed and not self._stored(writer, param, present):
                run.add(writer)
        return tuple(sorted(run))

    def _stored(self, unit: int, param: Param, present: set[Output]) -> bool:
        kept = self.split.kept.get(unit, ())
        return not {param, EVERYTHING}.isdisjoint(kept) and all((unit, p) in present for p in kept)
