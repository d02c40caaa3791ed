"""Reading and writing cached values, against flat files, a file for each sample, and Arrow.

A large sample is what a row of a 1024-pixel picture and its caption takes in a large model: latents bf16 [16, 128, 128] and
text bf16 [160, 3584], 1.67 MB. A small one is 2.5 kB.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

import torch
from figure import Figure, best, interleaved, seconds
from formats import (
    DATASETS,
    FLAT,
    HAS_DATASETS,
    OTHERS,
    OURS,
    OURS_AHEAD,
    PTH,
    Format,
    Sample,
    key,
    write_ours,
    write_pth,
)

from flowrun.cache import Cache
from flowrun.cache.store import Store
from flowrun.config import Verify

Shapes = Mapping[str, tuple[int, ...]]
LARGE, SMALL = {"latents": (16, 128, 128), "text": (160, 3584)}, {"latents": (16, 8, 8), "text": (1, 256)}
COUNTS = {"large": 160, "small": 2000}
ON_DISK = 96  # large samples
ROUNDS, COLD_ROUNDS, WRITE_ROUNDS = 9, 5, 3
MOST_SHARE, MOST_BYTES = 0.005, 128  # of the payload, and per sample


def measure() -> list[Figure]:
    # In memory: what a disk does besides would hide the difference, and the page cache is what a warm read is about.
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as warm, tempfile.TemporaryDirectory() as disk:
        found = [*_reads("large", LARGE, Path(warm) / "l"), *_reads("small", SMALL, Path(warm) / "s")]
        found += [_verify(Path(warm) / "v"), *_cold(Path(disk) / "c"), *_writes(Path(disk) / "w")]
    return found if HAS_DATASETS else [*found, Figure(f"the same against {DATASETS.name}", "not installed: pip install datasets")]


def _samples(shapes: Shapes, many: int) -> list[Sample]:
    noise = torch.Generator().manual_seed(0)
    few = [{name: torch.randn(shape, generator=noise).bfloat16() for name, shape in shapes.items()} for _ in range(20)]
    return [{name: value + n for name, value in few[n % 20].items()} for n in range(many)]


def _written(folder: Path, samples: Sequence[Sample], formats: Sequence[Format]) -> dict[Format, Path]:
    places = {format: folder / str(n) for n, format in enumerate(formats)}
    for format, place in places.items():
        place.mkdir(parents=True)
        format.write(place, samples)
    return places


def _reads(kind: str, shapes: Shapes, folder: Path) -> list[Figure]:
    """Random order, each sample read once by a reader that was just opened, so every checksum is compared."""
    samples = _samples(shapes, COUNTS[kind])
    order = random.Random(0).sample(range(len(samples)), len(samples))
    places = _written(folder, samples, [OURS, *OTHERS])
    mine, *others = interleaved(*[_walk(format, place, shapes, order) for format, place in places.items()], rounds=ROUNDS)
    rate, least = f"{len(order) / mine:,.0f} samples/s", {"large": 3, "small": 20}[kind]
    found = [
        Figure(f"reading {kind} samples, checksums on, against {format.name}", f"{theirs / mine:.2f}x ({rate})")
        for format, theirs in zip(OTHERS, others, strict=True)
    ]
    theirs = dict(zip(OTHERS, others, strict=True))
    found[OTHERS.index(PTH)] = Figure(
        f"reading {kind} samples, checksums on, against {PTH.name}", f"{theirs[PTH] / mine:.1f}x ({rate})", f">= {least}x",
        theirs[PTH] >= least * mine, f"{mine / len(order) * 1e6:.0f} us a sample",
    )  # fmt: skip
    if kind == "large":
        share = theirs[FLAT] / mine
        found[OTHERS.index(FLAT)] = Figure(
            f"reading large samples, checksums on, against {FLAT.name}", f"{100 * share:.0f} %", ">= 90 %", share >= 0.9,
            _bound(places[OURS], shapes, order, theirs[FLAT]),
        )  # fmt: skip
    return found


def _bound(folder: Path, shapes: Shapes, order: Sequence[int], flat: float) -> str:
    """What the time is made of, from a walk without checksums."""
    store = Store(folder, Verify.never)
    unchecked = best(lambda: [store.get_many([key(n, name) for name in shapes]) is None for n in order], ROUNDS)
    return f"without checksums it would be {100 * flat / unchecked:.0f} %"


def _walk(format: Format, place: Path, shapes: Shapes, order: Sequence[int]) -> Callable[[], float]:
    def act() -> float:
        read = format.open(place, shapes, order)
        return seconds(lambda: [read(n) is None for n in order])

    return act


def _verify(folder: Path) -> Figure:
    samples = _samples(LARGE, COUNTS["large"])
    write_ours(folder, samples)
    size = sum(value.nbytes for sample in samples for value in sample.values())
    taken = best(lambda: Cache(folder).verify(), 5)
    return Figure("`verify` on large values", f"{size / taken / 1e9:.1f} GB/s", ">= 4 GB/s", size >= 4e9 * taken)


def _cold(folder: Path) -> list[Figure]:
    """Shuffled, read ahead by 8 samples, against in order and against the others; the files leave memory before each."""
    samples = _samples(LARGE, ON_DISK)
    shuffled, straight = random.Random(0).sample(range(ON_DISK), ON_DISK), list(range(ON_DISK))
    places = _written(folder, samples, [OURS_AHEAD, *OTHERS])
    walks = [(OURS_AHEAD, straight), (OURS_AHEAD, shuffled), *((other, shuffled) for other in OTHERS)]

    def cold(format: Format, order: Sequence[int]) -> float:
        _forget(places[format])
        return _walk(format, places[format], LARGE, order)()

    in_order, mine, *others = interleaved(*[lambda w=walk: cold(*w) for walk in walks], rounds=COLD_ROUNDS)
    rate, share = f"{ON_DISK / mine:,.0f} samples/s", in_order / mine
    return [
        Figure("reading large samples from disk, shuffled against in order", f"{100 * share:.0f} % ({rate})", ">= 90 %",
               share >= 0.9, "the disk's own order"),
        *(Figure(f"reading large samples from disk, shuffled, against {other.name}", f"{theirs / mine:.2f}x")
          for other, theirs in zip(OTHERS, others, strict=True)),
    ]  # fmt: skip


def _forget(folder: Path) -> None:
    """Have the system drop what it holds of the folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def _writes(folder: Path) -> list[Figure]:
    samples = _samples(LARGE, ON_DISK)
    payload, number = sum(value.nbytes for sample in samples for value in sample.values()), count()

    def fresh() -> Path:
        place = folder / str(next(number))
        place.mkdir(parents=True)
        return place

    def timed(act: Callable[[Path], None]) -> float:
        place = fresh()
        taken = seconds(lambda: act(place))
        shutil.rmtree(place)
        return taken

    def bare(place: Path) -> None:
        """The same bytes as one file, with one sync: what the disk allows."""
        with open(place / "flat", "wb") as file:
            for sample in samples:
                for value in sample.values():
                    file.write(value.view(torch.uint8).numpy())
            file.flush()
            os.fsync(file.fileno())

    acts = (
        lambda place: write_ours(place, samples, merge=False),
        lambda place: write_ours(place, samples),
        lambda place: write_pth(place, samples),
        lambda place: write_pth(place, samples, sync=True),
        bare,
    )
    mine, merged, loose, synced, least = interleaved(*[lambda a=act: timed(a) for act in acts], rounds=WRITE_ROUNDS)
    write_ours(place := fresh(), samples)
    over = (sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) - payload) / len(samples)
    cause = f"the disk: the bytes alone, with one sync, come to {loose / least:.2f}x"
    return [
        Figure("writing large samples, hashed and synced, against torch.save without sync", f"{loose / mine:.2f}x", ">= 0.75x",
               loose >= 0.75 * mine, cause),
        Figure("the same, against torch.save with sync", f"{synced / mine:.2f}x", ">= 1.5x", synced >= 1.5 * mine, cause),
        Figure("the same, against the bytes alone in one file with one sync", f"{least / mine:.2f}x"),
        Figure("the same, its shards merged at the end, against torch.save with sync", f"{synced / merged:.2f}x"),
        Figure("bytes on disk beyond the payload, large samples", f"{over:.0f} a sample ({over * len(samples) / payload:.3%})",
               f"<= {MOST_SHARE:.1%} + {MOST_BYTES} a sample", over * len(samples) <= MOST_SHARE * payload + MOST_BYTES * len(samples)),
    ]  # fmt: skip
