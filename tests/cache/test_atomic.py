"""pytest tests/cache/test_atomic.py: killed at any step, or out of disk space, a cache keeps what it had finished."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_samples import fill, in_child, key_of, same, shard_files, value_of

from flowrun import files
from flowrun.cache import Cache
from flowrun.cache.store import Store
from flowrun.config import Failure

KILLED = 9


def die_at(step: int) -> Callable[[Any], Any]:
    """Replace every file operation that changes the disk's state by one that counts, and ends the process at `step`."""
    count = iter(range(1_000_000))

    def mortal(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(count) == step:
                os._exit(KILLED)
            return operation(*args, **kwargs)

        return run

    files.fsync, files.replace, Path.unlink = mortal(files.fsync), mortal(files.replace), mortal(Path.unlink)
    return mortal


def scenario(root: Path, log: Path) -> None:
    """Three flushes, then a merge; `log` lists the numbers that had been flushed."""
    store = Store(root)
    with store.writer(1e3, 1e3) as writer:
        for first in (0, 3, 6):
            for number in range(first, first + 3):
                writer.put(key_of(number), value_of(number), f"row {number}")
            writer.flush()
            log.write_text(f"{first + 3}")
    store.merge()
    log.write_text("done")


@pytest.mark.slow
def test_a_kill_at_any_step_loses_only_what_was_not_flushed(tmp_path: Path) -> None:
    for step in range(100):
        root, log = tmp_path / f"cache{step}", tmp_path / f"log{step}"
        code = in_child(lambda root=root, log=log, step=step: (die_at(step), scenario(root, log)))
        flushed = 9 if log.exists() and log.read_text() == "done" else int(log.read_text()) if log.exists() else 0
        store = Store(root)
        lost = store.missing([key_of(n) for n in range(9)])
        assert not set(lost) & {key_of(n) for n in range(flushed)}, f"killed at step {step}"
        for number in range(9):
            if key_of(number) not in lost:
                assert same(store.get(key_of(number)), value_of(number))
        if root.exists():
            assert Cache(root).verify() == []
        if code == 0:
            break
        scenario(root, log)  # the next run goes on as if nothing had happened
        assert Store(root).missing([key_of(n) for n in range(9)]) == []
    assert code == 0 and step > 15  # every step was tried


def test_partial_files_of_a_killed_writer_are_counted_and_pruned(root: Path) -> None:
    fill(root, range(3), per_shard=3)
    for step in (0, 1):  # before fsync, before rename
        assert in_child(lambda step=step: (die_at(step), fill(root, range(10, 13), per_shard=3))) == KILLED
    partial = list((root / "shards").glob(".*.part"))
    assert len(partial) == 2 and len(list((root / "writers").iterdir())) == 2
    assert Cache(root).stats().temporary_files == 4
    assert Cache(root).prune().temporary_files == 4
    assert not list((root / "shards").glob(".*")) and not list((root / "writers").iterdir())


def test_killed_by_the_system_at_any_moment_every_record_is_whole_and_little_is_lost(tmp_path: Path) -> None:
    rng, per_flush = random.Random(0), 4
    for trial in range(4):
        root, progress = tmp_path / f"cache{trial}", tmp_path / f"progress{trial}"
        progress.touch()
        child = os.fork()
        if child == 0:
            try:
                with (
                    Store(root).writer(flush_mb=per_flush * 140 / 1e6, flush_s=30) as writer,
                    open(progress, "a") as log,
                ):
                    for number in range(1_000_000):
                        writer.put(key_of(number % 5000), value_of(number % 5000), f"row {number}")
                        os.write(log.fileno(), b".")
            finally:
                os._exit(1)
        deadline = time.monotonic() + 20
        while progress.stat().st_size < 40 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        put = min(progress.stat().st_size, 5000)
        store = Store(root)
        there = [n for n in range(put) if not store.missing([key_of(n)])]
        assert put >= 40 and len(there) >= put - per_flush
        assert all(same(store.get(key_of(n)), value_of(n)) for n in there)
        assert Cache(root).verify() == []


class FullDisk:
    """A file that takes `room` bytes, then says that the disk is full, as the kernel does."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@pytest.fixture(params=[0, 200, 1500])
def full_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    def fill_up() -> None:
        monkeypatch.setattr(files, "open", lambda *a, **k: FullDisk(open(*a, **k), request.param), raising=False)  # noqa: SIM115

    yield fill_up


def test_a_full_disk_is_a_clear_failure_and_costs_nothing_that_was_written(
    root: Path, full_disk: Callable[[], None]
) -> None:
    store = fill(root, range(3), per_shard=3)
    before = {path: path.read_bytes() for path in shard_files(root)}
    full_disk()
    with pytest.raises(
        Failure, match="the disk was full while saving .*safetensors to .*shards; .*what was saved before is untouched"
    ):
        fill(root, range(3, 9), per_shard=6)
    assert {path: path.read_bytes() for path in (root / "shards").iterdir()} == before  # no partial file
    assert all(same(store.get(key_of(n)), value_of(n)) for n in range(3))


def test_after_a_full_disk_the_same_writer_can_go_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(root).writer(1e3, 1e3) as writer:
        writer.put(key_of(0), value_of(0), "row")
        with monkeypatch.context() as full:
            full.setattr(files, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
            with pytest.raises(Failure, match="the disk was full"):
                writer.flush()
        assert shard_files(root) == []
        writer.put(key_of(1), value_of(1), "row")
    assert [same(Store(root).get(key_of(n)), value_of(n)) for n in (0, 1)] == [True, True]


def test_other_errors_pass_and_leave_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    monkeypatch.setattr(files, "replace", lambda a, b: (_ for _ in ()).throw(OSError(errno.EIO, "input/output error")))
    with pytest.raises(OSError, match="input/output"), files.appearing(target) as file:
        file.write(b"new")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_file_and_folder_reach_the_disk_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(
        files, "fsync", lambda handle: done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
    )
    monkeypatch.setattr(files, "replace", lambda a, b: done.append("rename") or os.replace(a, b))
    with files.appearing(tmp_path / "file") as file:
        file.write(b"x")
    assert done == ["file", "rename", "folder"]
