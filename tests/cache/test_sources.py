"""pytest tests/cache/test_sources.py: a file is read once, and again whenever it may have changed."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from cache_samples import flip, in_child

from flowrun.cache import segments, sources
from flowrun.cache.segments import MOST_SEGMENTS
from flowrun.cache.sources import Sources, folder_identity
from flowrun.config import ConfigError, Verify


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return written(tmp_path / "a.png", b"picture")


def written(path: Path, content: bytes, age_s: float = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time.time() - age_s,) * 2)
    time.sleep(0.03)  # what changed within a tick of the clock is not remembered
    return path


def reads(root: Path, path: Path, verify: Verify = Verify.first_read) -> tuple[int, bytes]:
    """How often a new process reads the file, and the hash that it gets."""
    with Sources(root, verify) as sources:
        found = sources.hash_file(path)
        assert sources.hash_file(path) == found
        return sources.read, found


def test_the_hash_is_that_of_the_content(root: Path, picture: Path) -> None:
    assert reads(root, picture) == (1, hashlib.blake2b(b"picture", digest_size=16).digest())


def test_a_file_is_read_once_for_ever(root: Path, picture: Path) -> None:
    first = reads(root, picture)
    assert reads(root, picture) == (0, first[1])


@pytest.mark.parametrize("change", ["content", "time", "size", "replaced", "overwritten"])
def test_whatever_may_mean_a_change_is_read_again(root: Path, picture: Path, change: str) -> None:
    _, before = reads(root, picture)
    time_ns = picture.stat().st_mtime_ns
    if change == "content":
        written(picture, b"PICTURE", age_s=50)
    elif change == "time":
        os.utime(picture, ns=(time_ns + 1, time_ns + 1))
    elif change == "size":
        picture.write_bytes(b"longer picture")
        os.utime(picture, ns=(time_ns, time_ns))
    elif change == "overwritten":  # same size, inode and time, as tools leave it that unpack or copy
        picture.write_bytes(b"PICTURE")
        os.utime(picture, ns=(time_ns, time_ns))
    else:
        other = written(picture.with_name("b.png"), b"PICTURE")
        os.utime(other, ns=(time_ns, time_ns))
        os.replace(other, picture)  # same size, same time, another inode
    time.sleep(0.03)
    count, after = reads(root, picture)
    assert count == 1 and (after == before) == (change == "time")


def test_equal_files_at_two_paths_are_both_read_and_equal(root: Path, tmp_path: Path) -> None:
    a, b = written(tmp_path / "x" / "1.png", b"same"), written(tmp_path / "y" / "1.png", b"same")
    with Sources(root, Verify.first_read) as sources:
        assert sources.hash_file(a) == sources.hash_file(b) and sources.read == 2


def test_full_verification_reads_again_and_corrects_what_was_remembered(
    root: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = segments.stamp(str(picture), picture.stat())
    monkeypatch.setattr(sources, "stamp", lambda path, status: stamp)  # a change that leaves no trace
    _, before = reads(root, picture)
    with open(picture, "r+b") as file:
        file.write(b"PICTURE")
    time.sleep(0.03)
    assert reads(root, picture) == (0, before)  # not noticed
    count, after = reads(root, picture, Verify.full)
    assert count == 1 and after == hashlib.blake2b(b"PICTURE", digest_size=16).digest()
    assert reads(root, picture) == (0, after)  # the later memory wins


def test_a_file_changed_just_now_is_not_remembered(root: Path, tmp_path: Path) -> None:
    """Its next change might come within the same tick of the file system's clock."""
    fresh = tmp_path / "fresh.png"
    fresh.write_bytes(b"one")
    now = time.time_ns()
    os.utime(fresh, ns=(now, now))
    with Sources(root, Verify.first_read) as sources:
        sources.hash_file(fresh)
        fresh.write_bytes(b"two")
        os.utime(fresh, ns=(now, now))
        assert sources.hash_file(fresh) == hashlib.blake2b(b"two", digest_size=16).digest()


def test_many_segments_become_one_and_nothing_is_forgotten(root: Path, tmp_path: Path) -> None:
    files = [written(tmp_path / f"{n}.png", str(n).encode()) for n in range(2 * MOST_SEGMENTS + 3)]
    for file in files:
        reads(root, file)
    assert len(list((root / "sources").iterdir())) <= MOST_SEGMENTS
    with Sources(root, Verify.first_read) as sources:
        assert [sources.hash_file(file) for file in files] == [
            hashlib.blake2b(f.read_bytes(), digest_size=16).digest() for f in files
        ]
        assert sources.read == 0


def test_processes_add_to_one_memory(root: Path, tmp_path: Path) -> None:
    files = [written(tmp_path / f"{n}.png", str(n).encode()) for n in range(4)]
    mine = Sources(root, Verify.first_read)
    assert in_child(lambda: [reads(root, file) for file in files[:2]]) == 0
    for file in files[2:]:
        mine.hash_file(file)
    mine.save()
    assert [reads(root, file)[0] for file in files] == [0, 0, 0, 0]


def test_a_damaged_memory_is_only_a_loss_of_time(root: Path, picture: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, found = reads(root, picture)
    (segment,) = (root / "sources").iterdir()
    flip(segment, segment.stat().st_size - 20)
    assert reads(root, picture) == (1, found) and segment.name in caplog.text
    caplog.clear()
    assert reads(root, picture) == (0, found) and not caplog.text  # the next start hears nothing of it


def test_a_later_programs_memory_is_left_alone(root: Path, picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FORMAT", "flowrun-cache-sources-9")
    reads(root, picture)
    (later,) = (root / "sources").iterdir()
    content = later.read_bytes()
    monkeypatch.undo()
    for n in range(2 * MOST_SEGMENTS):
        reads(root, written(tmp_path / f"{n}.png", str(n).encode()))
    assert later.read_bytes() == content and len(list((root / "sources").iterdir())) <= MOST_SEGMENTS + 1


def test_nothing_new_writes_nothing(root: Path) -> None:
    Sources(root, Verify.first_read).save()
    assert not root.exists()


def test_a_missing_file_is_an_error(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Sources(root, Verify.first_read).hash_file(tmp_path / "none.png")


MODEL = {
    "model.safetensors": b"weights",
    "config.json": b"{}",
    "tokenizer/vocab.json": b"{}",
    "tokenizer/merges.txt": b"a b",
}


def identity(folder: Path, files: dict[str, bytes]) -> bytes:
    for name, content in files.items():
        written(folder / name, content)
    return folder_identity(folder, lambda path: hashlib.blake2b(path.read_bytes(), digest_size=16).digest())


@pytest.mark.parametrize("name", MODEL)
def test_a_models_identity_changes_with_every_file_that_matters(tmp_path: Path, name: str) -> None:
    base = identity(tmp_path / "a", MODEL)
    assert identity(tmp_path / "b", MODEL) == base
    assert identity(tmp_path / "c", {**MODEL, name: MODEL[name] + b"!"}) != base
    moved = {("other_" + n if n == name and n != "model.safetensors" else n): content for n, content in MODEL.items()}
    assert (identity(tmp_path / "d", moved) == base) == (moved == MODEL)


def test_a_models_identity_does_not_change_with_what_is_not_loaded(tmp_path: Path) -> None:
    base = identity(tmp_path / "a", MODEL)
    extra = {
        "README.md": b"read me",
        ".git/config.json": b"{}",
        "picture.png": b"p",
        "pytorch_model.bin": b"old weights",
    }
    assert identity(tmp_path / "b", {**MODEL, **extra}) == base


def test_old_weights_count_where_there_are_no_others_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    old = {"pytorch_model.bin": b"1", "config.json": b"{}"}
    assert identity(tmp_path / "a", old) != identity(tmp_path / "b", {**old, "pytorch_model.bin": b"2"})
    with pytest.raises(ConfigError, match="model.weights: .* holds no weights"):
        identity(tmp_path / "c", {"config.json": b"{}"})
