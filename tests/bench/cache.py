"""How a cache of many rows opens: its index, its manifests; look-ups and keys."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from figure import Figure, best

from flowrun.cache.index import Index
from flowrun.cache.keyplan import KeyPlan
from flowrun.cache.layout import Layout
from flowrun.cache.manifest import Kept, Manifest, ManifestRow, Part, Parts, write_manifest
from flowrun.cache.store import Store
from flowrun.graph import Unit
from flowrun.splitters import split

ROWS, MANY = 100_000, 1_000_000


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        return [*_opening(root / "some"), _million(root / "many"), _keys()]


def _opening(root: Path) -> list[Figure]:
    keys = [_key(n) for n in range(ROWS)]
    with Store(root).writer(64, 1e9) as writer:
        for key in keys:
            writer.put(key, torch.zeros(1), "row")
    Store(root).merge()
    manifest, index = _manifest(root, ROWS), Layout(root).index

    def opened() -> None:
        assert len(Store(root)) == len(Manifest(manifest)) == ROWS

    with_index = best(opened, 9)
    store = Store(root)
    lookup = best(lambda: [store.missing([key]) for key in keys[:1000]], 9) / 1000
    index.unlink()
    without = best(opened, 9)
    return [
        Figure(f"opening a cache of {ROWS:,} rows and its manifest", f"{with_index * 1e3:.1f} ms", "<= 25 ms", with_index <= 25e-3),
        Figure("the same without its index", f"{without * 1e3:.1f} ms", "<= 100 ms", without <= 0.1, "the shards' tables"),
        Figure("look-up of one value", f"{lookup * 1e6:.1f} us", "< 50 us", lookup < 50e-6),
    ]


def _manifest(root: Path, rows: int) -> Path:
    key = {Kept(0, "text", "shared", "prompt_embeds"): _key(0)}
    listed = [ManifestRow(f"{n}.png", "caption", (64, 64), _key(1), "", key) for n in range(rows)]
    return write_manifest(root, Parts("m", "d", {"x": Part("1", "1")}), listed)


MILLION = r"""
import re, sys, time
from pathlib import Path
import numpy as np
from flowrun.cache.index import Index
from flowrun.cache.manifest import Manifest
# Most memory that this program held, kB; ru_maxrss would begin with that of the process that started it.
held = lambda: int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
before, began = held(), time.perf_counter()
index, manifest = Index.load(Path(sys.argv[1])), Manifest(Path(sys.argv[2]))
found = index.find([bytes(16)]), index.find_array(manifest.keys.reshape(-1, 16)), manifest.row(len(manifest) - 1)
print(time.perf_counter() - began, (held() - before) / 2**20)
"""


def _million(root: Path) -> Figure:
    """In a process of its own, with a look-up of every row's key."""
    root.mkdir()
    keys = np.random.default_rng(0).integers(0, 256, (MANY, 16), np.uint8)
    Index.empty().updated({"s": 1}, lambda name: keys).save(root / "index")
    child = [sys.executable, "-c", MILLION, str(root / "index"), str(_manifest(root, MANY))]
    taken, more = map(float, subprocess.run(child, capture_output=True, text=True, check=True).stdout.split())
    value = f"{taken:.2f} s, {more:.2f} GiB"
    return Figure(f"opening {MANY:,} rows, and a look-up of each", value, "< 2 s, < 1 GiB", taken < 2 and more < 1, "reading them")


def _keys() -> Figure:
    units = [Unit(name=f"u{i}", input_params=(f"p{i}",), output_params=(f"p{i + 1}",), process=_key) for i in range(3)]
    plan = KeyPlan(split("replay", units, {"transformer"}), {}, b"", 0)
    given, rows = {("shared", "p0"): list(map(_key, range(10_000)))}, list(map(str, range(10_000)))
    taken = best(lambda: plan.columns(given, rows), 5)
    return Figure("keys of 10,000 rows through 3 units", f"{taken:.2f} s", "< 1 s", taken < 1)


def _key(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=16).digest()
