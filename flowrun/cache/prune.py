"""Taking away what nobody needs, on request only. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrun.cache.catalog import Catalog
from flowrun.cache.layout import MANIFEST_NAME, SHARD_NAME, TEMP_NAME, WRITER_NAME, Layout, is_alive
from flowrun.cache.manifest import Manifest, manifests
from flowrun.cache.merge import LOCK_NAME, maintenance, rewrite
from flowrun.cache.quarantine import FAULT_NAME
from flowrun.config import Failure
from flowrun.files import sync_folder


@dataclass(frozen=True, slots=True)
class Pruned:
    """What went: values, bytes of files, and files of every other kind."""

    values: int
    bytes: int
    manifests: int
    temporary_files: int


def prune(catalog: Catalog, superseded: bool) -> Pruned:
    """See Cache.prune."""
    layout = catalog.layout
    with maintenance(layout.root) as allowed:
        writers = [path.name for path, alive in _writers(layout) if alive]
        if writers or not allowed:
            raise Failure(
                f"{layout.root} is in use ({', '.join(writers) or 'its shards are being merged'})",
                "prune it when that has ended",
            )
        known, unreadable = manifests(layout.root)
        if unreadable:
            # What an unreadable manifest needs is not known, so nothing can be called unneeded.
            raise Failure(
                f"the manifest {unreadable[0]}",
                "remove the file if its rows may go, or run stage=cache to write it again",
            )
        gone = _superseded(known) if superseded else []
        before = _bytes(layout)
        for manifest in gone:
            manifest.path.unlink()
        values = _drop_values(catalog, needed_keys([manifest for manifest in known if manifest not in gone]))
        temporary = temporaries(layout, dead_only=True)
        for path in temporary:
            path.unlink(missing_ok=True)
        return Pruned(values, before - _bytes(layout), len(gone), len(temporary))


def needed_keys(known: Sequence[Manifest]) -> set[bytes]:
    return {key.tobytes() for manifest in known for key in manifest.used_keys()}


def orphans(catalog: Catalog, needed: set[bytes]) -> dict[str, list[int]]:
    """Shard name -> numbers of its values that are not needed; shards without any are left out."""
    idle = {shard.name: [n for n in catalog.listed(shard) if shard.key(n) not in needed] for shard in catalog.shards()}
    return {name: numbers for name, numbers in idle.items() if numbers}


def temporaries(layout: Layout, dead_only: bool) -> list[Path]:
    """Partial files and marks of writers; dead_only: of those whose process is gone."""
    partial = [(path, match) for folder in layout.folders if folder.is_dir() for path in sorted(folder.iterdir())
               if (match := TEMP_NAME.fullmatch(path.name))]  # fmt: skip
    found = [path for path, match in partial if not (dead_only and is_alive(match, path))]
    return found + [path for path, alive in _writers(layout) if not (dead_only and alive)]


def unknown_files(layout: Layout) -> list[Path]:
    """Files in the cache's folders that are none of ours; they are counted and otherwise left alone."""
    ours: dict[Path, Sequence[re.Pattern[str]]] = {
        layout.root: (re.compile("|".join(map(re.escape, (layout.index.name, LOCK_NAME, layout.pace.name)))), TEMP_NAME),
        layout.shards: (SHARD_NAME, TEMP_NAME), layout.sources: (SHARD_NAME, TEMP_NAME), layout.looks: (SHARD_NAME, TEMP_NAME),
        layout.writers: (WRITER_NAME,),
        layout.manifests: (MANIFEST_NAME, TEMP_NAME), layout.quarantine: (FAULT_NAME, TEMP_NAME)}  # fmt: skip
    return [path for folder, patterns in ours.items() if folder.is_dir() for path in sorted(folder.iterdir())
            if path not in ours and not any(pattern.fullmatch(path.name) for pattern in patterns)]  # fmt: skip


def _writers(layout: Layout) -> Iterator[tuple[Path, bool]]:
    """Marks of writers, and whether each may still be at work."""
    for path in sorted(layout.writers.iterdir()) if layout.writers.is_dir() else ():
        if match := WRITER_NAME.fullmatch(path.name):
            yield path, is_alive(match, path)


def _superseded(known: Sequence[Manifest]) -> list[Manifest]:
    """known: newest first."""
    newer: dict[tuple[str, str, str], list[bool]] = {}  # names -> whether each newer one is of a run that has not ended
    gone = []
    for manifest in known:
        seen = newer.setdefault((manifest.parts.model, manifest.parts.data, manifest.parts.place), [])
        if False in seen or manifest.begun in seen:
            gone.append(manifest)
        seen.append(manifest.begun)
    return gone


def _drop_values(catalog: Catalog, needed: set[bytes]) -> int:
    """Rewrite or remove the shards that hold orphans or damaged values, then forget the faults of files now gone."""
    idle = orphans(catalog, needed)
    aside = [fault for _, fault in catalog.quarantine]
    for name in sorted({*idle, *(fault.shard for fault in aside if fault.value is not None)}):
        rewrite(catalog, [name], needed.__contains__)
    for fault in aside:
        if fault.value is None:
            (catalog.layout.shards / fault.shard).unlink(missing_ok=True)
    sync_folder(catalog.layout.shards)
    present = catalog.present()
    for path, fault in list(catalog.quarantine):
        if fault.shard not in present:
            path.unlink(missing_ok=True)
    catalog.save_index()
    return sum(len(numbers) for numbers in idle.values())


def _bytes(layout: Layout) -> int:
    return sum(
        path.stat().st_size
        for folder in (layout.shards, layout.manifests)
        if folder.is_dir()
        for path in folder.iterdir()
    )
