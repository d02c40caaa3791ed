"""pytest tests/cache/test_trust.py: damaged values and files are noticed, named, set aside and made again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_samples import fill, flip, key_of, same, shard_files, value_at, value_of

from flowrun.cache import Cache, quarantine
from flowrun.cache.catalog import DamagedValue
from flowrun.cache.store import Store
from flowrun.cache.tensorfile import write_tensorfile
from flowrun.config import Verify


def test_a_stack_is_checked_and_takes_an_intact_copy_where_there_is_one(root: Path) -> None:
    stores = [Store(root), Store(root)]
    for store in stores:
        with store.writer(64, 30) as writer:
            for number in range(3):
                writer.put(key_of(number), value_of(number), f"row {number}")
    first, second = shard_files(root)
    flip(first, value_at(first, 1))
    assert same(Store(root).stack([key_of(n) for n in (2, 1, 0)]), torch.stack([value_of(n) for n in (2, 1, 0)]))
    flip(second, value_at(second, 2))
    flip(first, value_at(first, 2))
    with pytest.raises(DamagedValue, match="row 'row 2'"):
        Store(root).stack([key_of(0), key_of(2)])


@pytest.mark.parametrize("verify", [Verify.first_read, Verify.full])
def test_a_changed_value_is_named_set_aside_and_made_again(root: Path, verify: Verify) -> None:
    fill(root, range(6), per_shard=3)
    (path,) = [path for path in shard_files(root) if value_of(1).numpy().tobytes() in path.read_bytes()]
    flip(path, value_at(path, 1) + 40)
    store = Store(root, verify)
    with pytest.raises(DamagedValue, match="row 'row 1'") as caught:
        store.get(key_of(1))
    assert (
        key_of(1).hex() in str(caught.value) and path.name in str(caught.value) and "stage=cache" in str(caught.value)
    )
    everything = [key_of(n) for n in range(6)]
    assert store.missing(everything) == Store(root).missing(everything) == [key_of(1)]
    with store.writer(64, 30) as writer:
        assert writer.put(key_of(1), value_of(1), "row 1")
    assert Store(root).missing(everything) == []
    assert all(same(Store(root).get(key_of(n)), value_of(n)) for n in range(6))


def test_a_changed_value_goes_unnoticed_without_checksums(root: Path) -> None:
    """The control of the test above: it is the checksum that notices, nothing else."""
    fill(root, range(3), per_shard=3)
    (path,) = shard_files(root)
    flip(path, value_at(path, 1) + 40)
    read = Store(root, Verify.never).get(key_of(1))
    assert not same(read, value_of(1)) and (read != value_of(1)).sum() <= 3


def test_full_verification_misses_damaged_values_before_they_are_read(root: Path) -> None:
    fill(root, range(3), per_shard=3)
    (path,) = shard_files(root)
    flip(path, value_at(path, 2))
    wanted = [key_of(n) for n in range(3)]
    assert Store(root, Verify.first_read).missing(wanted) == []
    assert Store(root, Verify.full).missing(wanted) == [key_of(2)]
    assert Store(root, Verify.first_read).missing(wanted) == [key_of(2)]  # it is known to all from now on


def test_a_value_is_checked_once_per_process_by_default(root: Path) -> None:
    store = fill(root, range(1), per_shard=1)
    store.get(key_of(0))
    (path,) = shard_files(root)
    flip(path, value_at(path, 0))
    store.get(key_of(0))  # trusted since the first read
    with pytest.raises(DamagedValue):
        Store(root).get(key_of(0))


def test_an_intact_copy_is_used_when_another_is_damaged(root: Path) -> None:
    first, second = Store(root), Store(root)
    for store in (first, second):  # neither knows of the other's value
        with store.writer(64, 30) as writer:
            writer.put(key_of(0), value_of(0), "row")
    assert len(shard_files(root)) == 2
    for path in shard_files(root):
        store = Store(root)
        whole = path.read_bytes()
        flip(path, value_at(path, 0))
        assert same(store.get(key_of(0)), value_of(0))
        path.write_bytes(whole)
        for fault in (root / "quarantine").iterdir():
            fault.unlink()


def test_a_shard_that_cannot_be_opened_is_set_aside_whole(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(root, range(6), per_shard=3)
    path = shard_files(root)[0]
    lost = [n for n in range(6) if value_of(n).numpy().tobytes() in path.read_bytes()]
    path.write_bytes(path.read_bytes()[:-50])
    store = Store(root)
    assert path.name in caplog.text
    assert store.missing([key_of(n) for n in range(6)]) == [key_of(n) for n in lost] and len(lost) == 3


def test_a_shard_damaged_while_the_index_vouches_for_it_is_named_when_read(root: Path) -> None:
    fill(root, range(3), per_shard=3).merge()
    (path,) = shard_files(root)
    flip(path, path.read_bytes().index(key_of(1)))  # a table; the size stays
    store = Store(root)
    assert store.missing([key_of(0)]) == []
    with pytest.raises(DamagedValue, match=path.name):
        store.get(key_of(0))
    assert Store(root).missing([key_of(0)]) == [key_of(0)]


def test_files_of_unknown_names_are_left_alone(root: Path) -> None:
    fill(root, range(2), per_shard=1)
    notes = [root / "shards" / "notes.txt", root / "shards" / "mine.safetensors", root / "quarantine" / "mine.json"]
    for note in notes:
        note.write_text("mine")
    store = Store(root)
    assert len(store) == 2 and all(note.read_text() == "mine" for note in notes)


def test_shards_of_another_format_version_are_left_alone(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(root, range(2), per_shard=2)
    newer = root / "shards" / "host-1-0123456789ab-00000.safetensors"
    write_tensorfile(newer, "flowrun-cache-99", [], {})
    store = Store(root)
    store.refresh()
    assert len(store) == 2 and newer.exists() and not list((root / "quarantine").iterdir())
    assert caplog.text.count("flowrun-cache-99") == 1


def test_a_cache_that_cannot_be_written_is_still_read_and_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, range(3), per_shard=3)
    (path,) = shard_files(root)
    flip(path, value_at(path, 1))

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(quarantine, "write_atomic", refuse)
    store = Store(root)
    with pytest.raises(DamagedValue):
        store.get(key_of(1))
    assert store.missing([key_of(n) for n in range(3)]) == [key_of(1)]
    assert same(store.get(key_of(0)), value_of(0))


@pytest.mark.parametrize(("ending", "content"), [(".json", "bad"), (".1.json", "[1]"), (".json", '{"shard": 1}')])
def test_a_note_about_damage_that_cannot_be_read_sets_its_shard_aside(root: Path, ending: str, content: str) -> None:
    fill(root, range(4), per_shard=2)
    (path,) = [path for path in shard_files(root) if value_of(1).numpy().tobytes() in path.read_bytes()]
    (root / "quarantine").mkdir(exist_ok=True)
    (root / "quarantine" / f"{path.name}{ending}").write_text(content)
    everything = [key_of(n) for n in range(4)]
    assert Store(root).missing(everything) == [key_of(0), key_of(1)]
    fill(root, range(2), per_shard=2)
    assert Store(root).missing(everything) == [] and Cache(root).verify() == []
