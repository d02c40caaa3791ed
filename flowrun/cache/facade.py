"""A cache as one looks at it from outside: what is in it, whether it is sound, what can go. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowrun.cache.catalog import Catalog
from flowrun.cache.key import KEY_BYTES
from flowrun.cache.layout import Layout
from flowrun.cache.manifest import Manifest, ManifestRow, manifests
from flowrun.cache.prune import Pruned, needed_keys, orphans, prune, temporaries, unknown_files
from flowrun.cache.quarantine import Fault, Quarantine
from flowrun.config import ConfigError, Verify


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. where: file. key: hexadecimal, None for a whole file. rows: ids of those concerned."""

    where: str
    what: str
    key: str | None = None
    rows: tuple[str, ...] = ()

    def __str__(self) -> str:
        subject = f"{self.where}: " + (f"value {self.key}: " if self.key else "") + self.what
        return subject + (f" (rows: {', '.join(self.rows)})" if self.rows else "")


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts, and sizes in bytes. orphans: values that no manifest needs, of those that can be read.

    set_aside: values and shards that were found damaged, until `prune`."""

    manifests: int
    damaged_manifests: int
    rows: int
    values: int
    value_bytes: int
    shards: int
    shard_bytes: int
    orphans: int
    orphan_bytes: int
    set_aside: int
    temporary_files: int
    unknown_files: int


class Cache:
    """The cache in folder `path`. Raises ConfigError when there is no such folder or it holds no cache."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not Layout(self.path).shards.is_dir() and (not self.path.is_dir() or any(self.path.iterdir())):
            what = "is not a cache" if self.path.is_dir() else "is not a folder"
            raise ConfigError("cache", f"{self.path} {what}", "give the folder that cache.root names")

    def verify(self) -> list[Finding]:
        """Read everything again and return what is wrong. Damaged values are set aside, for stage=cache to redo."""
        before = dict(Quarantine(Layout(self.path).quarantine))
        catalog = Catalog(self.path, Verify.first_read)  # may find damaged shards already
        known, unreadable = manifests(self.path)
        found = [Finding(fault.path.name, fault.why) for fault in unreadable]
        new = _recheck(catalog, before)
        for fault in [*_lost(before.values(), catalog), *new]:
            rows = () if fault.key is None else _rows_with(known, bytes.fromhex(fault.key), fault.row)
            found.append(Finding(fault.shard, fault.what, fault.key, rows))
        told = {finding.key for finding in found}
        gaps = [gap for manifest in known if not manifest.begun for gap in _gaps(catalog, manifest, told)]
        shards = [Finding(fault.shard, f"{fault.what} (found before)") for fault in before.values() if fault.key is None]
        return found + (shards if gaps else []) + gaps

    def stats(self) -> Stats:
        catalog = Catalog(self.path, Verify.never)
        known, unreadable = manifests(self.path)
        sizes = {shard.name: shard.sizes() for shard in catalog.shards()}
        idle = orphans(catalog, needed_keys(known))
        return Stats(
            manifests=len(known), damaged_manifests=len(unreadable),
            rows=len({row_id for manifest in known for row_id in manifest.ids.all()}),
            values=len(catalog.index), value_bytes=int(sum(size.sum() for size in sizes.values())),
            shards=len(catalog.index.sizes), shard_bytes=sum(catalog.index.sizes.values()),
            orphans=sum(len(numbers) for numbers in idle.values()),
            orphan_bytes=int(sum(sizes[name][numbers].sum() for name, numbers in idle.items())),
            set_aside=sum(1 for _ in catalog.quarantine),
            temporary_files=len(temporaries(catalog.layout, dead_only=False)),
            unknown_files=len(unknown_files(catalog.layout)),
        )  # fmt: skip

    def prune(self, superseded: bool = False) -> Pruned:
        """Remove what no manifest needs, damaged values, and what killed writers left; never a file of unknown name.

        superseded: also remove, before that, every manifest that is not the newest of its model and data; of runs that have
        not come to their end only the last one's stays, if it began later than that.
        Raises Failure while a run writes to the cache.
        """
        return prune(Catalog(self.path, Verify.never), superseded)

    def rows(self) -> Iterator[tuple[Manifest, ManifestRow]]:
        """Every row of every manifest, newest manifest first."""
        known, _ = manifests(self.path)
        return ((manifest, row) for manifest in known for row in manifest.rows())


def _lost(faults: Collection[Fault], catalog: Catalog) -> list[Fault]:
    """Values that were found damaged before and have not been made again."""
    return [fault for fault in faults if fault.key and catalog.index.find([bytes.fromhex(fault.key)])[0] < 0]


def _recheck(catalog: Catalog, before: Collection[Path]) -> list[Fault]:
    """Read every value that is not set aside, and set aside the damaged ones. Returns what is not among `before`."""
    for shard in catalog.shards():
        for number in catalog.listed(shard):
            if not shard.is_intact(number):
                catalog.set_aside(catalog.fault(shard, number))
    return [fault for path, fault in catalog.quarantine if path not in before]


def _rows_with(known: list[Manifest], key: bytes, first: str) -> tuple[str, ...]:
    """The rows that need `key`; the row that it was stored for when no manifest says."""
    wanted = np.frombuffer(key, np.uint8)
    rows = [
        m.ids[number] for m in known for number in np.flatnonzero((m.keys == wanted).all(axis=2).any(axis=1)).tolist()
    ]
    return tuple(dict.fromkeys(rows)) or (first,)


def _gaps(catalog: Catalog, manifest: Manifest, told: set[str | None]) -> list[Finding]:
    """One finding for all values that rows of the manifest need and that are not there, but for those in `told`."""
    keys = manifest.keys.reshape(-1, KEY_BYTES)
    absent = (catalog.index.find_array(keys) < 0) & keys.any(axis=1)
    places = [place for place in np.flatnonzero(absent).tolist() if keys[place].tobytes().hex() not in told]
    if not places:
        return []
    lacking = {keys[place].tobytes().hex() for place in places}
    rows = tuple(dict.fromkeys(manifest.ids[place // len(manifest.kept)] for place in places))
    if len(lacking) == 1:
        return [Finding(manifest.path.name, "no shard holds it", lacking.pop(), rows)]
    return [Finding(manifest.path.name, f"no shard holds {len(lacking)} of its values", None, rows)]
