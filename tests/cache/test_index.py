"""pytest tests/cache/test_index.py: the index finds what is there, and heals whatever happened to its file."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from cache_samples import fill, flip, key_of, same, shard_files, value_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.cache.index import FEW, Index
from flowrun.cache.store import Store

# Few values for each half, so that many keys agree in one half only.
halves = st.sampled_from([b"\0" * 8, b"\1" + b"\0" * 7, b"\0" * 7 + b"\1", b"\xff" * 8, b"abcdefgh"])
keys = st.builds(bytes.__add__, halves, halves)
shards = st.lists(st.lists(keys, max_size=6), max_size=5)


def index_of(contents: dict[str, list[bytes]], index: Index | None = None) -> Index:
    arrays = {name: np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16) for name, keys in contents.items()}
    return (index or Index.empty()).updated(dict.fromkeys(contents, 1), arrays.__getitem__)


@settings(max_examples=150, deadline=None)
@given(shards, shards, st.lists(keys, max_size=2 * FEW))
def test_it_finds_exactly_what_a_dictionary_finds(first: list, second: list, wanted: list[bytes]) -> None:
    """Truth: the shards' lists themselves. `first` is indexed, then some of it goes and `second` comes."""
    before = {f"a{n}": keys for n, keys in enumerate(first)}
    after = {name: keys for n, (name, keys) in enumerate(before.items()) if n % 2} | {
        f"b{n}": keys for n, keys in enumerate(second)
    }
    for index, contents in ((index_of(before), before), (index_of(after, index_of(before)), after)):
        assert len(index) == sum(map(len, contents.values()))
        everything = [key for keys in contents.values() for key in keys]
        for key, place in zip(wanted + everything, index.places(wanted + everything), strict=True):
            holders = {(name, number) for name, keys in contents.items() for number, k in enumerate(keys) if k == key}
            assert (place in holders) if holders else place is None
        few = wanted[:FEW]
        assert index.find(few) == index.find_array(np.frombuffer(b"".join(few), np.uint8).reshape(-1, 16)).tolist()


@settings(max_examples=60, deadline=None)
@given(shards)
def test_values_taken_out_are_found_in_other_shards_or_not_at_all(contents: list[list[bytes]]) -> None:
    named = {f"s{n}": keys for n, keys in enumerate(contents)}
    gone = [(name, number) for name, keys in named.items() for number in range(len(keys)) if (number + len(name)) % 2]
    index = index_of(named).without(gone)
    left = {
        (name, number): key
        for name, keys in named.items()
        for number, key in enumerate(keys)
        if (name, number) not in gone
    }
    for key in {key for keys in contents for key in keys}:
        (place,) = index.places([key])
        assert left.get(place) == key if key in left.values() else place is None


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    rng = random.Random(0)
    contents = {f"s{n}": [rng.randbytes(16) for _ in range(100)] for n in range(5)}
    index = index_of(contents)
    index.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    everything = [key for keys in contents.values() for key in keys]
    assert (
        loaded.places(everything)
        == index.places(everything)
        == [(n, i) for n, ks in contents.items() for i in range(len(ks))]
    )


def lose(root: Path) -> None:
    (root / "index.safetensors").unlink()


def cut(root: Path) -> None:
    path = root / "index.safetensors"
    path.write_bytes(path.read_bytes()[:-20])


def empty(root: Path) -> None:
    (root / "index.safetensors").write_bytes(b"")


def garble(root: Path) -> None:
    flip(root / "index.safetensors", (root / "index.safetensors").stat().st_size // 2)


def nothing(root: Path) -> None:
    """The control."""


@pytest.mark.parametrize("harm", [lose, cut, empty, garble, nothing])
def test_whatever_happens_to_its_file_every_value_is_found(root: Path, harm) -> None:
    fill(root, range(20), per_shard=6).merge()
    harm(root)
    store = Store(root)
    assert len(store) == 20 and store.missing([key_of(n) for n in range(25)]) == [key_of(n) for n in range(20, 25)]
    assert all(same(store.get(key_of(n)), value_of(n)) for n in range(20))
    store.merge()
    assert len(Index.load(root / "index.safetensors")) == 20  # and the file is whole again


def test_an_index_older_than_the_shards_is_completed(root: Path) -> None:
    fill(root, range(10), per_shard=5).merge()
    old = (root / "index.safetensors").read_bytes()
    fill(root, range(10, 20), per_shard=5).merge()
    (root / "index.safetensors").write_bytes(old)
    store = Store(root)
    assert store.missing([key_of(n) for n in range(20)]) == []
    assert all(same(store.get(key_of(n)), value_of(n)) for n in range(20))


def test_entries_of_shards_that_are_gone_are_dropped(root: Path) -> None:
    fill(root, range(10), per_shard=5).catalog.save_index()
    path = shard_files(root)[0]
    lost = [n for n in range(10) if value_of(n).numpy().tobytes() in path.read_bytes()]
    path.unlink()
    assert Store(root).missing([key_of(n) for n in range(10)]) == [key_of(n) for n in lost] and len(lost) == 5


def test_opening_with_an_index_reads_no_shard(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, range(10), per_shard=5).catalog.save_index()
    monkeypatch.setattr("flowrun.cache.catalog.Shard", None)
    assert Store(root).missing([key_of(n) for n in range(11)]) == [key_of(10)]
