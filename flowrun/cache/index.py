"""Which shard holds which key: sorted arrays, no object per key. No torch.

    first, second [N] uint64   the two halves of each key, sorted by `first`
    shard, value  [N]          number into metadata["shards"]; number of the value in that shard

The index is derived. `Index.updated` brings it up to date with the shards that are really there, whatever its file
said. A key that several shards hold has as many entries.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flowrun.cache.tensorfile import TensorFile, shrink, table, write_tensorfile

FEW = 32  # keys; up to here a binary search for each is quicker than the arrays' fixed cost
HALVES = struct.Struct("<QQ")
FORMAT = "flowrun-cache-index-1"


@dataclass(frozen=True, slots=True)
class Index:
    """`sizes`: shard name -> bytes of its file when it was indexed; its order numbers the shards."""

    sizes: Mapping[str, int]
    first: np.ndarray
    second: np.ndarray
    shard: np.ndarray
    value: np.ndarray
    names: list[str] = field(init=False, repr=False)  # of the shards, by number
    views: list[memoryview] = field(init=False, repr=False)  # of the arrays: quicker for one number

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", list(self.sizes))
        object.__setattr__(self, "views", [memoryview(a) for a in (self.first, self.second, self.shard, self.value)])

    @classmethod
    def empty(cls) -> Index:
        return cls({}, np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.uint32), np.zeros(0, np.uint32))

    @classmethod
    def load(cls, path: Path) -> Index:
        """Map the index file. Raises FileNotFoundError, Damaged."""
        file = TensorFile(path, FORMAT)
        return cls(
            json.loads(file.metadata["shards"]), *(file.array(name) for name in ("first", "second", "shard", "value"))
        )

    def save(self, path: Path) -> None:
        arrays = [
            table("first", self.first),
            table("second", self.second),
            table("shard", shrink(self.shard)),
            table("value", shrink(self.value)),
        ]
        write_tensorfile(path, FORMAT, arrays, {"shards": json.dumps(dict(self.sizes))})

    def __len__(self) -> int:
        return len(self.first)

    def updated(self, present: Mapping[str, int], keys_of: Callable[[str], np.ndarray | None]) -> Index:
        """This index without the shards that are gone or changed in size, and with those that are new.

        present: shard name -> size of its file. keys_of: the [V, 16] keys of a new shard, or None to leave it out.
        """
        kept = {name: size for name, size in self.sizes.items() if present.get(name) == size}
        fresh = {name: keys for name in present if name not in kept and (keys := keys_of(name)) is not None}
        index = self if len(kept) == len(self.sizes) else self._only(kept)
        return index._with(fresh, present) if fresh else index

    def without(self, values: Collection[tuple[str, int]]) -> Index:
        """This index without some (shard name, value number)."""
        numbers = {name: number for number, name in enumerate(self.names)}
        keep = np.ones(len(self), bool)
        for name, value in values:
            if name in numbers:
                keep &= (self.shard != numbers[name]) | (self.value != value)
        return self if keep.all() else self._masked(self.sizes, self.shard, keep)

    def _only(self, kept: Mapping[str, int]) -> Index:
        renumber = np.full(len(self.sizes), -1, np.int64)
        names = {name: number for number, name in enumerate(kept)}
        for number, name in enumerate(self.names):
            renumber[number] = names.get(name, -1)
        shard = renumber[self.shard]
        return self._masked(kept, shard, shard >= 0)

    def _masked(self, sizes: Mapping[str, int], shard: np.ndarray, keep: np.ndarray) -> Index:
        return Index(sizes, self.first[keep], self.second[keep], shard[keep].astype(np.uint32), self.value[keep])

    def _with(self, fresh: Mapping[str, np.ndarray], present: Mapping[str, int]) -> Index:
        halves = np.concatenate([_halves(keys) for keys in fresh.values()])  # [new, 2]
        shard = np.repeat(
            np.arange(len(fresh), dtype=np.uint32) + len(self.sizes), [len(keys) for keys in fresh.values()]
        )
        value = np.concatenate([np.arange(len(keys), dtype=np.uint32) for keys in fresh.values()])
        order = np.argsort(halves[:, 0], kind="stable")
        at = np.searchsorted(self.first, halves[order, 0], side="right") + np.arange(len(order))
        is_new = np.zeros(len(self) + len(order), bool)
        is_new[at] = True

        def woven(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            out = np.empty(len(is_new), new.dtype)
            out[at], out[~is_new] = new[order], old
            return out

        return Index(
            {**self.sizes, **{name: present[name] for name in fresh}},
            woven(self.first, halves[:, 0]),
            woven(self.second, halves[:, 1]),
            woven(self.shard, shard),
            woven(self.value, value),
        )

    def inside(self, name: str) -> np.ndarray:
        """Entry numbers of the values of one shard."""
        return np.flatnonzero(self.shard == self.names.index(name))

    def outside(self, names: Collection[str]) -> Index:
        """This index without some shards."""
        return self._only({name: size for name, size in self.sizes.items() if name not in names})

    def places(self, keys: Sequence[bytes]) -> list[tuple[str, int] | None]:
        """(shard name, value number) of each key, None where there is none."""
        names, (_, _, shard, value) = self.names, self.views
        return [(names[shard[entry]], value[entry]) if entry >= 0 else None for entry in self.find(keys)]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Entry number of each key, -1 when it is not there."""
        if len(keys) > FEW:
            return self.find_array(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)).tolist()
        first, second, _, _ = self.views
        return [self._find_one(first, second, *HALVES.unpack(key)) for key in keys]

    @staticmethod
    def _find_one(firsts: memoryview, seconds: memoryview, first: int, second: int) -> int:
        at = bisect_left(firsts, first)
        while at < len(firsts) and firsts[at] == first:
            if seconds[at] == second:
                return at
            at += 1
        return -1

    def find_array(self, keys: np.ndarray) -> np.ndarray:
        """As `find`, for keys [V, 16] uint8: int64 [V]."""
        wanted = _halves(keys)
        first, second = wanted[:, 0].copy(), wanted[:, 1]
        at = np.searchsorted(self.first, first)
        found = np.full(len(wanted), -1, np.int64)
        open_ = np.flatnonzero(at < len(self))  # of the keys, those that may still be found
        while len(open_):
            open_ = open_[self.first[at[open_]] == first[open_]]
            hit = self.second[at[open_]] == second[open_]
            found[open_[hit]] = at[open_[hit]]
            open_ = open_[~hit]
            at[open_] += 1
            open_ = open_[at[open_] < len(self)]
        return found


def _halves(keys: np.ndarray) -> np.ndarray:
    """[V, 16] bytes as [V, 2] numbers."""
    return np.ascontiguousarray(keys).view("<u8")
