"""pytest tests/cache/test_merge.py: merging and readers, writers, damage and other mergers."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from cache_samples import fill, flip, in_child, key_of, same, shard_files, value_at, value_of

from flowrun import disk, files
from flowrun.cache import merge as merging
from flowrun.cache.catalog import Catalog
from flowrun.cache.shard import ShardBuilder
from flowrun.cache.store import Store
from flowrun.config import Verify


def holds(root: Path, numbers: range) -> bool:
    store = Store(root)
    return store.missing([key_of(n) for n in numbers]) == [] and all(
        same(store.get(key_of(n)), value_of(n)) for n in numbers
    )


def test_small_shards_become_one_with_every_value_once(root: Path) -> None:
    stores = [Store(root), Store(root)]
    for store in stores:  # written twice, since neither writer knew of the other
        with store.writer(1e3, 1e3) as writer:
            for number in range(6):
                writer.put(key_of(number), value_of(number), f"row {number}")
    fill(root, range(6, 20), per_shard=3)
    count = len(shard_files(root))
    assert count > 6 and Store(root).merge() == count
    assert len(shard_files(root)) == 1 and len(Store(root)) == 20 and holds(root, range(20))
    assert Store(root).merge() == 0  # nothing left to do


def test_large_shards_are_left_alone_and_new_ones_stay_within_the_limit(root: Path) -> None:
    fill(root, range(5), per_shard=5)
    (large,) = shard_files(root)
    fill(root, range(5, 45), per_shard=2)
    small = max(path.stat().st_size for path in shard_files(root) if path != large)
    assert small < large.stat().st_size
    large_bytes = 6 * small
    merging.merge(Catalog(root, Verify.first_read), small_bytes=small + 1, large_bytes=large_bytes)
    assert large in shard_files(root)
    assert len(shard_files(root)) == 5 and all(path.stat().st_size <= large_bytes for path in shard_files(root))
    assert holds(root, range(45))


def test_a_reader_goes_on_while_shards_are_merged_under_it(root: Path) -> None:
    fill(root, range(12), per_shard=3)
    reader = Store(root)
    assert same(reader.get(key_of(0)), value_of(0))
    Store(root).merge()
    assert all(same(reader.get(key_of(n)), value_of(n)) for n in range(12))  # open shards and not yet opened ones


def test_a_writer_goes_on_while_its_shards_are_merged(root: Path) -> None:
    with Store(root).writer(1e3, 1e3) as writer:
        for number in range(6):
            writer.put(key_of(number), value_of(number), "row")
            writer.flush()
        Store(root).merge()
        assert not writer.put(key_of(0), value_of(0), "row")
        writer.put(key_of(6), value_of(6), "row")
    assert len(shard_files(root)) == 2 and len(Store(root)) == 7 and holds(root, range(7))


def test_a_damaged_value_does_not_survive_and_is_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(root, range(6), per_shard=3)
    (path,) = [path for path in shard_files(root) if value_of(4).numpy().tobytes() in path.read_bytes()]
    flip(path, value_at(path, 4))
    Store(root).merge()
    assert "row 'row 4'" in caplog.text
    assert Store(root).missing([key_of(n) for n in range(6)]) == [key_of(4)]
    assert len(shard_files(root)) == 1


def test_a_copy_elsewhere_is_trusted_only_after_it_was_checked(root: Path) -> None:
    stores = [Store(root), Store(root)]
    for store, numbers in zip(stores, (range(30), range(3)), strict=True):  # a large shard and a small one
        with store.writer(1e3, 1e3) as writer:
            for number in numbers:
                writer.put(key_of(number), value_of(number), "row")
    large = max(shard_files(root), key=lambda path: path.stat().st_size)
    fill(root, range(40, 42), per_shard=1)
    flip(large, value_at(large, 1))
    merging.merge(Catalog(root, Verify.never), small_bytes=large.stat().st_size, large_bytes=1 << 20)
    assert len(shard_files(root)) == 2
    store = Store(root)
    assert store.missing([key_of(n) for n in range(30)]) == [] and same(store.get(key_of(1)), value_of(1))


def test_values_left_twice_by_a_kill_are_cleared_by_the_next_merge(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, range(6), per_shard=2)
    before = shard_files(root)

    def killed() -> None:
        unlink = Path.unlink
        monkeypatch.setattr(Path, "unlink", lambda path, **k: os._exit(9) if path in before else unlink(path, **k))
        Store(root).merge()

    assert in_child(killed) == 9
    assert len(shard_files(root)) == 4 and holds(root, range(6))
    Store(root).merge()
    assert len(shard_files(root)) == 1 and len(Store(root)) == 6 and holds(root, range(6))


def test_only_one_process_merges_at_a_time_and_the_others_do_not_wait(root: Path) -> None:
    fill(root, range(4), per_shard=2)
    with open(root / merging.LOCK_NAME, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert Store(root).merge() == 0 and len(shard_files(root)) == 2
    assert Store(root).merge() == 2


@pytest.mark.parametrize("noticed", ["before", "while writing"])
def test_a_disk_without_room_for_a_second_copy_costs_nothing_but_the_merging(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, noticed: str
) -> None:
    fill(root, range(12), per_shard=3)
    before = shard_files(root)
    with monkeypatch.context() as full:
        if noticed == "before":
            size = sum(path.stat().st_size for path in before)
            full.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=size - 1))
        else:
            full.setattr(ShardBuilder, "write", without_room)
        assert Store(root).merge() == 0
    assert "4 shards are left unmerged" in caplog.text and shard_files(root) == before and holds(root, range(12))
    assert Store(root).merge() == 4 and holds(root, range(12))


def without_room(builder: ShardBuilder, path: Path) -> None:
    with disk.saving(path.parent, path.name), files.appearing(path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_merging_an_empty_cache_or_a_single_shard_changes_nothing(root: Path) -> None:
    with Store(root).writer(64, 30):
        pass
    assert Store(root).merge() == 0 and shard_files(root) == []
    fill(root, range(2), per_shard=2)
    before = shard_files(root)
    assert Store(root).merge() == 0 and shard_files(root) == before
