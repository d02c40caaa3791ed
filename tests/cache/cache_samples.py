"""What the cache's tests share: comparison bit by bit, values to store, damage to files, processes that die."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flowrun.cache.layout import Layout
from flowrun.cache.store import Store


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure, dtype, shape and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(x, y) for x, y in zip([*a, *a.values()], [*b, *b.values()], strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def key_of(number: int) -> bytes:
    """A key as good as random, the same in every process."""
    return (
        torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(number)).to(torch.uint8).numpy().tobytes()
    )


def value_of(number: int) -> torch.Tensor:
    """[7, 5] fp32, different for every number."""
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(number))


def fill(root: Path, numbers: range, per_shard: int) -> Store:
    """A store with value_of(n) under key_of(n), for row f"row {n}", in shards of `per_shard` values."""
    store = Store(root)
    with store.writer(flush_mb=1e3, flush_s=1e3) as writer:
        for count, number in enumerate(numbers, start=1):
            writer.put(key_of(number), value_of(number), f"row {number}", "shared.latents")
            if count % per_shard == 0:
                writer.flush()
    return store


def shard_files(root: Path) -> list[Path]:
    return sorted(Layout(root).shards.glob("*.safetensors"))


def flip(path: Path, at: int) -> None:
    """Change 8 bytes in place."""
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(8)
        file.seek(at)
        file.write(bytes(byte ^ 0xFF for byte in old))


def value_at(path: Path, number: int) -> int:
    """Where in a shard file the bytes of value_of(number) begin."""
    return path.read_bytes().index(value_of(number).numpy().tobytes())


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; returns its exit code, 0 when it came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
