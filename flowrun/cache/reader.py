"""Records of cached units: into the store, and back as what the executor re-applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrun.cache.keyplan import Output
from flowrun.cache.store import Store
from flowrun.cache.values import DELETED, NOT_RETURNED
from flowrun.cache.writer import Writer
from flowrun.graph import Param, Record, Unit

Visit = tuple[int, int]  # (row, variant)
HELD_BYTES = 64 * 2**20


def put_record(writer: Writer, keys: Mapping[Output, bytes], i: int, unit: Unit, record: Record, row_id: str) -> int:
    """Store what `unit`, of index `i`, returned for one row, as far as `keys` has a key for it.

    Returns how many values were new. A kept name that was not returned is stored as such.
    Raises BadValue naming the row, Failure when the disk is full.
    """
    new = 0
    for (owner, param), key in keys.items():
        if owner == i:
            value = _everything(record) if unit.is_barrier else _one(record, param)
            new += writer.put(key, value, row_id, ".".join(param))
    return new


def _one(record: Record, param: Param) -> Any:
    return DELETED if param in record.deleted else record.values.get(param, NOT_RETURNED)


def _everything(record: Record) -> dict[str, Any]:
    """A barrier may have returned any names, so its whole record is one value."""
    return {"values": dict(record.values), "deleted": sorted(record.deleted)}


class Reader:
    """What the cached units returned, by row and variant. keys: their kept outputs' keys, as a KeyPlan gave them."""

    def __init__(self, store: Store, units: Sequence[Unit], keys: Callable[[int, int], Mapping[Output, bytes]]) -> None:
        self.store, self.units, self.keys = store, units, keys
        self._held: dict[bytes, Tensor] = {}  # values that `stacked` has read
        self._room = HELD_BYTES  # negative once there were more

    def records(self, row: int, variant: int) -> dict[int, Record]:
        """Unit index -> Record, for every cached unit that keeps something. Raises MissingValue, DamagedValue."""
        return self.batch([(row, variant)])[0]

    def batch(self, visits: Sequence[Visit]) -> list[dict[int, Record]]:
        """`records` for several rows with one look-up."""
        wanted = [self.keys(row, variant) for row, variant in visits]
        values = iter(self.store.get_many([key for keys in wanted for key in keys.values()]))
        return [self._records({output: next(values) for output in keys}) for keys in wanted]

    def stacked(self, keys: Sequence[bytes]) -> Tensor:
        """Values that are one tensor each, as one fresh tensor [len(keys), *shape]. Raises as `Store.stack` does.

        Values of few bytes in all stay in memory: between training steps, finding one takes longer than copying it."""
        held = [self._held[key] for key in keys if key in self._held]
        if len(held) == len(keys) and len({(value.dtype, value.shape) for value in held}) == 1:
            return torch.stack(held)
        batch = self.store.stack(keys)
        for key, value in zip(keys, batch, strict=True):
            self._hold(key, value)
        return batch

    def _hold(self, key: bytes, value: Tensor) -> None:
        """All values or none: a part of them would seldom hold a whole batch."""
        if self._room >= 0 and key not in self._held:
            self._held[key] = value.clone()
            self._room -= value.nbytes
            if self._room < 0:
                self._held.clear()

    def ahead(self, visits: Sequence[Visit]) -> None:
        """Have the system read what these will need from disk, while the caller does something else."""
        self.store.ahead([key for row, variant in visits for key in self.keys(row, variant).values()])

    def _records(self, values: Mapping[Output, Any]) -> dict[int, Record]:
        returned: dict[int, dict[Param, Any]] = {}
        deleted: dict[int, set[Param]] = {}
        for (i, param), value in values.items():
            mine, gone = returned.setdefault(i, {}), deleted.setdefault(i, set())
            if self.units[i].is_barrier:
                mine.update(value["values"])
                gone.update(value["deleted"])
            elif value is DELETED:
                gone.add(param)
            elif value is not NOT_RETURNED:
                mine[param] = value
        return {i: Record(values, frozenset(deleted[i])) for i, values in returned.items()}
