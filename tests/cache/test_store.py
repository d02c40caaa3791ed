"""pytest tests/cache/test_store.py: look-up, flushing, and several processes on one cache."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
import torch
from cache_samples import fill, in_child, key_of, same, shard_files, value_of

from flowrun.cache import writer as writer_module
from flowrun.cache.catalog import MissingValue
from flowrun.cache.store import Store


def test_missing_lists_what_is_not_there_in_order(root: Path) -> None:
    store = fill(root, range(0, 100, 2), per_shard=9)
    wanted = [key_of(n) for n in range(100)]
    expected = [key_of(n) for n in range(1, 100, 2)]
    assert store.missing(wanted) == expected
    assert store.missing(wanted[:20]) == expected[:10]  # few keys are looked up in another way
    assert Store(root).missing(wanted) == expected
    assert store.missing([]) == []


def test_an_absent_or_empty_cache_misses_everything_and_is_not_created(root: Path) -> None:
    store = Store(root)
    assert store.missing([key_of(1)]) == [key_of(1)] and not root.exists()
    with pytest.raises(MissingValue, match=rf"the cache has no value {key_of(1).hex()}; run stage=cache"):
        store.get(key_of(1))


def test_a_process_keeps_only_so_many_shards_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, range(10), per_shard=1)
    monkeypatch.setattr("flowrun.cache.catalog.MOST_OPEN", 3)
    store = Store(root)
    for number in (*range(10), 4):
        assert same(store.get(key_of(number)), value_of(number))
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(root) in line}
        assert len([name for name in mapped if "shards" in name]) <= 3


def test_equal_keys_are_stored_once(root: Path) -> None:
    store = Store(root)
    with store.writer(64, 30) as writer:
        assert writer.put(key_of(1), value_of(1), "a")
        assert not writer.put(key_of(1), value_of(1), "b")  # before the flush
        writer.flush()
        assert not writer.put(key_of(1), value_of(1), "c")  # after it
    with Store(root).writer(64, 30) as writer:
        assert not writer.put(key_of(1), value_of(1), "d")  # in another run
    assert len(shard_files(root)) == 1 and len(Store(root)) == 1


def test_stack_is_the_stacked_values_in_fresh_memory(root: Path) -> None:
    store = fill(root, range(40), per_shard=7)
    order = [5, 39, 0, 5, 17]
    stacked = store.stack([key_of(n) for n in order])
    assert same(stacked, torch.stack([value_of(n) for n in order])) and stacked.data_ptr() % 64 == 0
    stacked.zero_()
    assert same(store.get(key_of(5)), value_of(5))


def test_stack_of_scalars_and_of_empty_tensors(root: Path) -> None:
    store = Store(root)
    with store.writer(64, 30) as writer:
        for number in range(3):
            writer.put(key_of(number), torch.tensor(number), "row")
            writer.put(key_of(10 + number), torch.zeros(2, 0, 3), "row")
    assert same(store.stack([key_of(n) for n in (2, 0, 1)]), torch.tensor([2, 0, 1]))
    assert same(store.stack([key_of(n) for n in (10, 11)]), torch.zeros(2, 2, 0, 3))


def test_what_cannot_be_stacked_is_refused(root: Path) -> None:
    store = Store(root)
    with store.writer(64, 30) as writer:
        for number, value in enumerate([torch.zeros(2), torch.zeros(3), torch.zeros(2).half(), "text"]):
            writer.put(key_of(number), value, "row")
    for other in (1, 2):
        with pytest.raises(ValueError, match="equal type and shape"):
            store.stack([key_of(0), key_of(other)])
    with pytest.raises(ValueError, match="value 1 is not a single tensor"):
        store.stack([key_of(0), key_of(3)])
    with pytest.raises(ValueError, match="nothing to stack"):
        store.stack([])


def test_reading_ahead_changes_nothing_and_passes_over_unknown_keys(root: Path) -> None:
    store = fill(root, range(5), per_shard=2)
    store.ahead([key_of(n) for n in range(9)])
    assert all(same(store.get(key_of(n)), value_of(n)) for n in range(5))


def test_a_flush_comes_after_the_set_megabytes(root: Path) -> None:
    with Store(root).writer(flush_mb=0.01, flush_s=1e9) as writer:
        counts = []
        for number in range(6):
            writer.put(key_of(number), torch.full((1000,), float(number)), "row")  # 4 kB
            counts.append(len(shard_files(root)))
    assert counts == [0, 0, 1, 1, 1, 2]


def test_a_flush_comes_before_work_is_older_than_the_set_seconds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: now[0])
    flushed_at = {}
    with Store(root).writer(flush_mb=1e9, flush_s=30) as writer:
        for number in range(1, 40):  # one value each 4 s
            now[0] = 4.0 * number
            writer.put(key_of(number), value_of(number), "row")
            for path in shard_files(root):
                flushed_at.setdefault(path, now[0])
    ages = [later - earlier for earlier, later in itertools.pairwise([0.0, *flushed_at.values()])]
    assert len(ages) >= 4 and max(ages) <= 30 + 4  # the oldest of a shard was put 4 s after the last flush
    assert min(ages) > 20


def test_slow_values_are_written_one_by_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: now[0])
    with Store(root).writer(flush_mb=1e9, flush_s=30) as writer:
        for number in range(4):
            now[0] += 40.0
            writer.put(key_of(number), value_of(number), "row")
            assert len(shard_files(root)) == number + 1


def test_work_is_kept_when_the_run_fails(root: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Store(root).writer(64, 30) as writer:
        writer.put(key_of(1), value_of(1), "row")
        raise KeyboardInterrupt
    assert same(Store(root).get(key_of(1)), value_of(1))


def test_two_writers_and_a_reader_at_once(root: Path) -> None:
    def write(numbers: range) -> None:
        with Store(root).writer(flush_mb=0.0005, flush_s=30) as writer:
            for number in numbers:
                writer.put(key_of(number), value_of(number), f"row {number}")

    children = []
    for numbers in (range(60), range(40, 100)):  # 20 in common
        child = os.fork()
        if child == 0:
            code = 1
            try:
                write(numbers)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    deadline, store = time.monotonic() + 30, Store(root)
    wanted = [key_of(n) for n in range(100)]
    while store.missing(wanted) and time.monotonic() < deadline:
        store.refresh()
        for number in range(100):
            if not store.missing([key_of(number)]):
                assert same(store.get(key_of(number)), value_of(number))
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert Store(root).missing(wanted) == [] and not list((root / "writers").iterdir())


def test_a_reader_finds_what_another_process_added_later(root: Path) -> None:
    store = Store(root)
    assert in_child(lambda: fill(root, range(3), per_shard=3)) == 0
    assert same(store.get(key_of(2)), value_of(2))
