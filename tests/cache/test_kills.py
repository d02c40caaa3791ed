"""pytest -m slow tests/cache/test_kills.py: killed at any instant, a cache holds each value whole or not at all.

Two writers, forked from one warm process, fill one cache with overlapping work; both are killed at a random moment. Then
the real command is killed in its cache stage and started again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cache_samples import key_of, same, shard_files, value_of

from flowrun.cache import Cache
from flowrun.cache.store import Store

INSTANTS = 200
VALUES = 400
PER_FLUSH = 8


def write(root: Path, numbers: list[int], progress: Path) -> None:
    """One writer's work; each byte in `progress` stands for one value that was put."""
    with Store(root).writer(flush_mb=PER_FLUSH * 140 / 1e6, flush_s=30) as writer, open(progress, "ab", buffering=0) as log:
        for number in numbers:
            writer.put(key_of(number), value_of(number), f"row {number}")
            log.write(b".")
    store = Store(root)
    store.refresh()
    store.merge()


def forked(root: Path, numbers: list[int], progress: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            write(root, numbers, progress)
        finally:
            os._exit(0)
    return child


def after(rng: random.Random, log: Path, count: int, span: float) -> None:
    """Wait for a random instant of a writer's work: as far into its `count` values as it comes, or into what it does then."""
    wanted, until = rng.randrange(count + count // 5), time.monotonic() + 60
    while (log.stat().st_size if log.exists() else 0) < min(wanted, count) and time.monotonic() < until:
        time.sleep(1e-4)
    time.sleep(rng.uniform(0, 0.2 * span if wanted >= count else 0.005))


@pytest.mark.slow
def test_two_writers_killed_at_any_instant_leave_values_whole_or_absent(tmp_path: Path) -> None:
    rng = random.Random(0)
    orders = [list(range(300)), list(range(VALUES - 1, 99, -1))]  # they meet in the middle
    for warm in range(VALUES):
        value_of(warm)
    began = time.monotonic()
    write(tmp_path / "whole", orders[0] + orders[1], tmp_path / "progress")
    span = time.monotonic() - began
    killed_in_work = 0
    for instant in range(INSTANTS):
        root, logs = tmp_path / f"cache{instant}", [tmp_path / f"log{instant}.{n}" for n in range(2)]
        children = [forked(root, order, log) for order, log in zip(orders, logs, strict=True)]
        after(rng, logs[0], len(orders[0]), span)
        for child in children:
            os.kill(child, signal.SIGKILL)
        codes = [os.waitpid(child, 0)[1] for child in children]
        killed_in_work += any(code == signal.SIGKILL for code in codes)
        put = [log.stat().st_size if log.exists() else 0 for log in logs]
        store = Store(root)
        there = {n for n in range(VALUES) if not store.missing([key_of(n)])}
        assert all(same(store.get(key_of(n)), value_of(n)) for n in there)
        for order, count in zip(orders, put, strict=True):
            lost = set(order[:count]) - there
            assert len(lost) <= PER_FLUSH, f"more than the open flush was lost at instant {instant}"
        if root.exists():
            assert Cache(root).verify() == []
        for order, log in zip(orders, logs, strict=True):
            write(root, order, log)
        store = Store(root)
        assert all(same(store.get(key_of(n)), value_of(n)) for n in range(VALUES))
        assert Cache(root).verify() == []
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert killed_in_work > INSTANTS / 2


@pytest.mark.slow
def test_the_command_killed_in_its_cache_stage_completes_at_the_next_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flowrun", "model=emoji_tiny", "stage=cache", "cache.flush_mb=0.05", "tracker=[csv]"]

    def environment(name: str) -> dict[str, str]:
        return {**os.environ, "FLOWRUN_OUTPUTS": str(tmp_path / name), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    subprocess.run(command, env=environment("whole"), check=True, capture_output=True)
    undisturbed = contents(tmp_path / "whole" / "cache")
    rng, interrupted = random.Random(0), 0
    for trial in range(5):
        process = subprocess.Popen(command, env=environment(f"o{trial}"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        shards = tmp_path / f"o{trial}" / "cache" / "shards"
        until = time.monotonic() + 120
        while not (shards.is_dir() and list(shards.glob("*.safetensors"))) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        interrupted += process.wait() == -signal.SIGKILL
        assert Cache(tmp_path / f"o{trial}" / "cache").verify() == []
        subprocess.run(command, env=environment(f"o{trial}"), check=True, capture_output=True)
        assert contents(tmp_path / f"o{trial}" / "cache") == undisturbed
    assert interrupted >= 3


def contents(root: Path) -> dict[bytes, str]:
    """Every value of a cache, as text."""
    store = Store(root)
    keys = [shard.key(number) for shard in store.catalog.shards() for number in range(len(shard))]
    assert shard_files(root)
    return {key: str(value) for key, value in zip(keys, map(plain, store.get_many(keys)), strict=True)}


def plain(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return str(value.dtype), list(value.shape), value.reshape(-1).view(torch.uint8).tolist()
