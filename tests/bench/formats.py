"""Ways to keep samples on disk: each writes them once, then opens its folder and reads one sample after the other.

Every reader gives its sample in memory of its own, as one that trains on it needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrun.cache.store import Store

Sample = Mapping[str, Tensor]  # bf16
Read = Callable[[int], object]


@dataclass(frozen=True)
class Format:
    """write(folder, samples); open(folder, shapes, order) -> read(number). order: in which numbers it will be asked for."""

    name: str
    write: Callable[[Path, Sequence[Sample]], None]
    open: Callable[[Path, Mapping[str, tuple[int, ...]], Sequence[int]], Read]


def key(number: int, name: str) -> bytes:
    return blake2b(f"{number} {name}".encode(), digest_size=16).digest()


def write_ours(folder: Path, samples: Sequence[Sample], merge: bool = True) -> None:
    """merge: save the index and make large shards of small ones, as at the end of every run."""
    store = Store(folder)
    with store.writer(64, 1e9) as writer:
        for n, sample in enumerate(samples):
            for name, value in sample.items():
                writer.put(key(n, name), value, str(n), name)
    if merge:
        store.merge()


def _open_ours(folder: Path, shapes: Mapping[str, tuple[int, ...]], order: Sequence[int]) -> Read:
    store = Store(folder)
    keys = [[key(n, name) for name in shapes] for n in range(len(order))]
    return lambda n: store.get_many(keys[n])


def _open_ours_ahead(folder: Path, shapes: Mapping[str, tuple[int, ...]], order: Sequence[int]) -> Read:
    """With a hint 8 samples ahead, as training gives."""
    store = Store(folder)
    keys = [[key(n, name) for name in shapes] for n in range(len(order))]
    after = {n: keys[later] for n, later in zip(order, order[8:], strict=False)}
    store.ahead([one for n in order[:8] for one in keys[n]])

    def read(n: int) -> object:
        store.ahead(after.get(n, []))
        return store.get_many(keys[n])

    return read


def _write_flat(folder: Path, samples: Sequence[Sample]) -> None:
    with open(folder / "flat", "wb") as file:
        for sample in samples:
            for value in sample.values():
                file.write(value.view(torch.uint8).numpy())


def _open_flat(folder: Path, shapes: Mapping[str, tuple[int, ...]], order: Sequence[int]) -> Read:
    """A sample is one row of bytes, copied out of the map at once."""
    data = np.memmap(folder / "flat", np.uint8, "r").reshape(len(order), -1)
    return lambda n: torch.from_numpy(np.array(data[n]))


def write_pth(folder: Path, samples: Sequence[Sample], sync: bool = False) -> None:
    for n, sample in enumerate(samples):
        with open(folder / f"{n}.pth", "wb") as file:
            torch.save(dict(sample), file)
            if sync:
                file.flush()
                os.fsync(file.fileno())


def _open_pth(folder: Path, shapes: Mapping[str, tuple[int, ...]], order: Sequence[int]) -> Read:
    return lambda n: torch.load(folder / f"{n}.pth")


def _write_safetensors(folder: Path, samples: Sequence[Sample]) -> None:
    for n, sample in enumerate(samples):
        save_file(dict(sample), folder / f"{n}.safetensors")


def _open_safetensors(folder: Path, shapes: Mapping[str, tuple[int, ...]], order: Sequence[int]) -> Read:
    return lambda n: {name: value.clone() for name, value in load_file(folder / f"{n}.safetensors").items()}


def _write_datasets(folder: Path, samples: Sequence[Sample]) -> None:
    import datasets
    import pyarrow

    columns = {name: [sample[name].view(torch.uint8).numpy().tobytes() for sample in samples] for name in samples[0]}
    datasets.disable_progress_bars()
    made = datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table(columns)), fingerprint="samples")
    made.save_to_disk(str(folder))


def _open_datasets(folder: Path, shapes: Mapping[str, tuple[int, ...]], order: Sequence[int]) -> Read:
    import datasets

    rows = datasets.load_from_disk(str(folder))
    return lambda n: {name: torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(shapes[name])
                      for name, data in rows[n].items()}  # fmt: skip


OURS = Format("flowrun", write_ours, _open_ours)
OURS_AHEAD = Format("flowrun", write_ours, _open_ours_ahead)
FLAT = Format("one flat memory-mapped file", _write_flat, _open_flat)
PTH = Format("torch.load of a file each", write_pth, _open_pth)
SAFETENSORS = Format("a safetensors file each", _write_safetensors, _open_safetensors)
DATASETS = Format("datasets (Arrow), binary columns", _write_datasets, _open_datasets)
HAS_DATASETS = find_spec("datasets") is not None
OTHERS = (FLAT, PTH, SAFETENSORS, *((DATASETS,) if HAS_DATASETS else ()))
