"""The store's small figures: opening, look-ups, keys, and reading small values against one file each."""

from __future__ import annotations

import tempfile
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from figure import Figure, best, interleaved

from flowrun.cache.index import Index
from flowrun.cache.keyplan import KeyPlan
from flowrun.cache.manifest import Kept, Manifest, ManifestRow, Part, Parts, write_manifest
from flowrun.cache.store import Store
from flowrun.graph import Unit
from flowrun.splitters import split

ROWS = 100_000


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        return [_index(root), _manifest(root), _keys(), *_reads(root)]


def _index(root: Path) -> Figure:
    keys = np.random.default_rng(0).integers(0, 256, (ROWS, 16), np.uint8)
    Index.empty().updated({"s": 1}, lambda name: keys).save(root / "index")
    taken = best(lambda: Index.load(root / "index").updated({"s": 1}, lambda name: None), 9)
    return Figure(f"opening an index of {ROWS:,} values", f"{taken * 1e3:.1f} ms", "<= 25 ms", taken <= 25e-3)


def _manifest(root: Path) -> Figure:
    keys = {Kept(0, "text", "shared", "prompt_embeds"): _key(0)}
    rows = [ManifestRow(f"{n}.png", "caption", (64, 64), _key(1), "", keys) for n in range(ROWS)]
    path = write_manifest(root, Parts("m", "d", {"x": Part("1", "1")}), rows)
    taken = best(lambda: Manifest(path), 9)
    return Figure(f"opening a manifest of {ROWS:,} rows", f"{taken * 1e3:.1f} ms", "<= 25 ms", taken <= 25e-3)


def _keys() -> Figure:
    units = [Unit(name=f"u{i}", input_params=(f"p{i}",), output_params=(f"p{i + 1}",), process=_key) for i in range(3)]
    plan, given = KeyPlan(split("replay", units, {"transformer"}), {}, b"", 0), {("shared", "p0"): _key(0)}
    taken = best(lambda: [plan.keys(given, str(row)) for row in range(1000)], 5) / 1000 * 10_000
    return Figure("keys of 10,000 rows through 3 units", f"{taken:.2f} s", "< 1 s", taken < 1)


def _reads(root: Path) -> list[Figure]:
    count, values = 96, {_key(n): torch.full((16, 64), float(n)) for n in range(960)}
    with Store(root).writer(64, 30) as writer:
        for key, value in values.items():
            writer.put(key, value, "row")
    for n in range(count):
        torch.save(torch.full((16, 64), float(n)), root / f"{n}.pth")
    store, keys = Store(root), list(values)[:count]
    store.get_many(keys)
    ours, theirs = interleaved(
        lambda: best(lambda: store.get_many(keys), 1),
        lambda: best(lambda: [torch.load(root / f"{n}.pth") for n in range(count)], 1),
        rounds=15,
    )
    lookup = best(lambda: [store.missing([key]) for key in keys], 9) / count
    return [
        Figure(
            "reading 96 values of 4 kB, against torch.load of a file each",
            f"{theirs / ours:.1f}x ({ours * 1e3:.2f} ms)",
            ">= 6x",
            theirs >= 6 * ours,
        ),
        Figure("look-up of one value", f"{lookup * 1e6:.1f} us", "< 50 us", lookup < 50e-6),
    ]


def _key(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=16).digest()
