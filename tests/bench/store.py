"""Reading and writing cached values, against flat files and against a file for each sample.

A large sample is what a row of a 1024-pixel picture and its caption takes in a large model: latents bf16 [16, 128, 128] and
text bf16 [160, 3584], 1.67 MB. A small one is 2.5 kB.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from figure import Figure, best, interleaved, seconds
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrun.cache import Cache
from flowrun.cache.store import Store

LARGE, SMALL = {"latents": (16, 128, 128), "text": (160, 3584)}, {"latents": (16, 8, 8), "text": (1, 256)}
COUNTS = {"large": 160, "small": 2000}
ROUNDS = 7


def measure() -> list[Figure]:
    # In memory: what a disk does besides would hide the difference, and the page cache is what a warm read is about.
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as warm, tempfile.TemporaryDirectory() as disk:
        found = [*_reads("large", LARGE, Path(warm) / "l"), *_reads("small", SMALL, Path(warm) / "s")]
        return [*found, *_writes(Path(disk) / "w"), _verify(Path(warm) / "v"), _cold(Path(disk) / "c"), _million(Path(disk) / "m")]


def _samples(shapes: dict[str, tuple[int, ...]], count: int) -> list[dict[str, Tensor]]:
    noise = torch.Generator().manual_seed(0)
    few = [{name: torch.randn(shape, generator=noise).bfloat16() for name, shape in shapes.items()} for _ in range(20)]
    return [{name: value + n for name, value in few[n % 20].items()} for n in range(count)]


def _key(number: int, name: str) -> bytes:
    return blake2b(f"{number} {name}".encode(), digest_size=16).digest()


def _fill(root: Path, samples: Sequence[dict[str, Tensor]]) -> None:
    with Store(root).writer(64, 1e9) as writer:
        for n, sample in enumerate(samples):
            for name, value in sample.items():
                writer.put(_key(n, name), value, str(n), name)


def _reads(kind: str, shapes: dict[str, tuple[int, ...]], folder: Path) -> list[Figure]:
    """Random order, each sample read once by a process that has not read it before, so every checksum is compared."""
    samples = _samples(shapes, COUNTS[kind])
    order = random.Random(0).sample(range(len(samples)), len(samples))
    _fill(folder / "store", samples)
    (folder / "pth").mkdir()
    (folder / "st").mkdir()
    for n, sample in enumerate(samples):
        torch.save(sample, folder / "pth" / f"{n}.pth")
        save_file(sample, folder / "st" / f"{n}.safetensors")
    flat, size = folder / "flat", sum(v.nbytes for v in samples[0].values())
    flat.write_bytes(b"".join(v.view(torch.uint8).numpy().tobytes() for s in samples for v in s.values()))

    def ours() -> None:
        store = Store(folder / "store")
        for n in order:
            store.get_many([_key(n, name) for name in shapes])

    def memmap() -> None:
        data = np.memmap(flat, np.uint8, "r")
        for n in order:
            torch.from_numpy(np.array(data[n * size : (n + 1) * size]))

    def pth() -> None:
        for n in order:
            torch.load(folder / "pth" / f"{n}.pth")

    def safetensors() -> None:
        for n in order:
            {name: value.clone() for name, value in load_file(folder / "st" / f"{n}.safetensors").items()}

    mine, flat_s, pth_s, st_s = interleaved(*[_timed(act) for act in (ours, memmap, pth, safetensors)], rounds=ROUNDS)
    rate, least = f"{len(order) / mine:,.0f} samples/s", {"large": 3, "small": 20}[kind]
    found = [
        Figure(f"reading {kind} samples, against torch.load of a file each", f"{pth_s / mine:.1f}x ({rate})", f">= {least}x",
               pth_s >= least * mine),
        Figure("the same, against a safetensors file each", f"{st_s / mine:.1f}x"),
    ]  # fmt: skip
    if kind == "large":
        share = flat_s / mine
        found.insert(0, Figure("reading large samples, checksums on, against one flat memory-mapped file", f"{100 * share:.0f} %",
                               ">= 90 %", share >= 0.9, "hashing and the look-up"))  # fmt: skip
    return found


def _timed(act: Callable[[], object]) -> Callable[[], float]:
    return lambda: seconds(act)


def _writes(folder: Path) -> list[Figure]:
    samples = _samples(LARGE, 96)
    count = iter(range(10**6))

    def ours() -> None:
        _fill(folder / f"store{next(count)}", samples)

    def pth(sync: bool) -> None:
        place = folder / f"pth{next(count)}"
        place.mkdir(parents=True)
        for n, sample in enumerate(samples):
            with open(place / f"{n}.pth", "wb") as file:
                torch.save(sample, file)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())

    mine, loose, synced = interleaved(*[_timed(act) for act in (ours, lambda: pth(False), lambda: pth(True))], rounds=3)
    return [
        Figure("writing large samples, hashed and synced, against torch.save without sync", f"{loose / mine:.2f}x", ">= 0.75x",
               loose >= 0.75 * mine, "the disk: torch.save leaves its files in memory"),
        Figure("the same, against torch.save with sync", f"{synced / mine:.2f}x", ">= 1.5x", synced >= 1.5 * mine),
    ]  # fmt: skip


def _verify(folder: Path) -> Figure:
    samples = _samples(LARGE, COUNTS["large"])
    _fill(folder, samples)
    size = sum(value.nbytes for sample in samples for value in sample.values())
    taken = best(lambda: Cache(folder).verify(), 5)
    return Figure("`verify` on large values", f"{size / taken / 1e9:.1f} GB/s", ">= 4 GB/s", size >= 4e9 * taken)


def _cold(folder: Path) -> Figure:
    """Shuffled with read-ahead of 8 samples, against in order; the files leave memory before each."""
    samples = _samples(LARGE, 96)
    _fill(folder, samples)
    orders = {"shuffled": random.Random(0).sample(range(96), 96), "in order": list(range(96))}

    def read(order: list[int]) -> float:
        for path in (folder / "shards").iterdir():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
        store = Store(folder)

        def walk() -> None:
            for at, n in enumerate(order):
                store.ahead([_key(m, name) for m in order[at + 1 : at + 9] for name in LARGE])
                store.get_many([_key(n, name) for name in LARGE])

        return seconds(walk)

    shuffled, straight = interleaved(lambda: read(orders["shuffled"]), lambda: read(orders["in order"]), rounds=5)
    share = straight / shuffled
    return Figure("reading large samples from disk, shuffled against in order", f"{100 * share:.0f} %", ">= 90 %", share >= 0.9)


MILLION = """
import resource, sys, time
import numpy as np
from pathlib import Path
from flowrun.cache.index import Index
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
index = Index.load(Path(sys.argv[1]))
index.find([bytes(16)])
print(time.perf_counter() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


def _million(folder: Path) -> Figure:
    from flowrun.cache.index import Index

    folder.mkdir()
    keys = np.random.default_rng(0).integers(0, 256, (1_000_000, 16), np.uint8)
    Index.empty().updated({"s": 1}, lambda name: keys).save(folder / "index")
    done = subprocess.run([sys.executable, "-c", MILLION, str(folder / "index")], capture_output=True, text=True, check=True)
    taken, more = map(float, done.stdout.split())
    return Figure("opening an index of 1,000,000 values, and a look-up", f"{taken * 1e3:.0f} ms, {more:.2f} GiB", "< 2 s, < 1 GiB",
                  taken < 2 and more < 1)  # fmt: skip
