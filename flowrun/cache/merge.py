"""Rewriting shards: many small ones become few large ones, and values that nobody wants are left out. No torch.

Always in this order: the new files, then the index, then the old files go. A kill in between leaves values twice, never
not at all. Readers that had an old file open keep it; others look again and find the new one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowrun.cache.catalog import Catalog
from flowrun.cache.shard import Shard, ShardBuilder
from flowrun.config import Failure
from flowrun.disk import check_room
from flowrun.files import new_writer, sync_folder

LOCK_NAME = "maintenance.lock"
SMALL_BYTES = 256 << 20  # shards below this are merged
LARGE_BYTES = 512 << 20  # into shards of at most this
BUSY = (errno.EWOULDBLOCK, errno.ENOLCK, errno.EOPNOTSUPP)  # another process is at it, or the file system has no locks
log = logging.getLogger(__name__)


@contextmanager
def maintenance(root: Path) -> Iterator[bool]:
    """Whether this process may rewrite shards now: one at a time may. Encoding and reading never wait for it."""
    with open(root / LOCK_NAME, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in BUSY:
                raise
            log.info("cache: shards are not rewritten now: %s", error.strerror)
            yield False
        else:
            yield True


def merge(catalog: Catalog, small_bytes: int = SMALL_BYTES, large_bytes: int = LARGE_BYTES) -> int:
    """Merge the small shards, and save the index. Returns how many went; 0 also when another process is at it.

    Old and new files lie side by side for a while. Where the disk has no room for both, shards stay as they are."""
    with maintenance(catalog.layout.root) as allowed:
        if not allowed:
            return 0
        catalog.save_index()
        small = {name: size for name, size in catalog.index.sizes.items() if size < small_bytes}
        gone = 0
        for group in _groups(small, large_bytes):
            try:
                check_room(catalog.layout.root, sum(small[name] for name in group), "the merging of small shards")
                gone += rewrite(catalog, group, lambda key: True)
            except Failure as full:
                log.warning("cache: %d shards are left unmerged, every value is there: %s", len(group), full)
        return gone


def _groups(sizes: dict[str, int], large_bytes: int) -> list[list[str]]:
    """Names in groups of two or more whose files together fit `large_bytes`, smallest first."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        if groups[-1] and total + size > large_bytes:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return [group for group in groups if len(group) > 1]


def rewrite(catalog: Catalog, names: Sequence[str], wanted: Callable[[bytes], bool]) -> int:
    """Replace shards by one that holds their intact, wanted values once each. Returns how many shards went.

    Call it under `maintenance`. A value that a shard outside `names` also holds is left to that one.
    """
    shards = [shard for shard in catalog.shards() if shard.name in names]
    builder = ShardBuilder()
    for shard in shards:
        _take(catalog, shard, {shard.name for shard in shards}, wanted, builder)
    if builder.keys:
        builder.write(catalog.layout.shards / f"{new_writer()}-00000.safetensors")
        catalog.save_index()
    for shard in shards:
        (catalog.layout.shards / shard.name).unlink(missing_ok=True)
    sync_folder(catalog.layout.shards)
    catalog.save_index()
    return len(shards)


def _take(
    catalog: Catalog, shard: Shard, group: set[str], wanted: Callable[[bytes], bool], builder: ShardBuilder
) -> None:
    """Add to `builder` what `shard` has to give. Values that were set aside are not in the index and stay out."""
    outside = catalog.index.outside(group)
    held = outside.find_array(shard.keys) >= 0
    for number in catalog.listed(shard):
        key = shard.key(number)
        if key in builder.keys or not wanted(key) or (held[number] and catalog.holds_intact(outside.places([key])[0])):
            continue
        if shard.is_intact(number):
            builder.add(shard.stored(number), shard.check(number))
        else:
            catalog.set_aside(catalog.fault(shard, number))
