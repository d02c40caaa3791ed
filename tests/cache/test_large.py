"""pytest tests/cache/test_large.py: values so large that several threads read them: alike, checked, and after a fork too."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_samples import flip, in_child, key_of, same, shard_files

from flowrun.cache import catalog, threads
from flowrun.cache.catalog import DamagedValue
from flowrun.cache.shard import Shard
from flowrun.cache.store import Store
from flowrun.cache.tensorfile import Damaged

COUNT = 12


def large(number: int) -> torch.Tensor:
    """[300, 400] fp32, 480 kB."""
    return torch.randn(300, 400, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def keys(root: Path) -> list[bytes]:
    keys = [key_of(number) for number in range(COUNT)]
    with Store(root).writer(2, 1e3) as writer:  # several shards
        for number, key in enumerate(keys):
            writer.put(key, large(number), f"row {number}", "shared.latents")
    assert COUNT * large(0).nbytes > catalog.LARGE_BYTES and len(shard_files(root)) > 1
    return keys


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Has helpers, however few processors there are; collects what they were given."""
    asked, drain = [], threads._drain
    monkeypatch.setattr(threads, "HELPERS", 3)
    monkeypatch.setattr(threads, "_drain", lambda act, rest: (asked.append(rest), drain(act, rest))[1])
    return asked


def test_they_come_back_in_order_and_exactly(root: Path, keys: list[bytes], helped: list[object]) -> None:
    order = [7, 0, 11, 3, 3, 5]
    values = Store(root).get_many([keys[number] for number in order])
    assert all(same(value, large(number)) for value, number in zip(values, order, strict=True))
    assert same(Store(root).stack(keys), torch.stack([large(number) for number in range(COUNT)]))
    assert helped


def test_the_damaged_one_is_named_and_the_others_are_read(root: Path, keys: list[bytes], helped: list[object]) -> None:
    shard = next(path for path in shard_files(root) if large(5).numpy().tobytes() in path.read_bytes())
    flip(shard, shard.read_bytes().index(large(5).numpy().tobytes()) + 1000)
    store = Store(root)
    with pytest.raises(DamagedValue, match="row 5"):
        store.get_many(keys)
    assert store.missing(keys) == [keys[5]]
    rest = [number for number in range(COUNT) if number != 5]
    assert all(same(value, large(n)) for value, n in zip(store.get_many([keys[n] for n in rest]), rest, strict=True))


def test_what_a_file_lacks_since_it_was_opened_is_not_made_up(root: Path, keys: list[bytes]) -> None:
    path = shard_files(root)[0]
    shard, memory = Shard(path), np.empty(1000, np.uint8)
    os.truncate(path, 5000)
    shard.file.read_into(memory, 4000)
    for begin in (4001, 5000, 6000):
        with pytest.raises(Damaged, match="cut short: it ends before byte"):
            shard.file.read_into(memory, begin)


def test_a_forked_process_reads_them_too(root: Path, keys: list[bytes], helped: list[object]) -> None:
    store = Store(root)
    store.get_many(keys)  # has threads, which the child will not have

    def read() -> None:
        assert all(same(value, large(number)) for number, value in enumerate(Store(root).get_many(keys)))

    assert in_child(read) == 0
