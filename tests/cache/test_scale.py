"""pytest tests/cache/test_scale.py: an index and a manifest of a million rows, against plain dicts, in bounded memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flowrun.cache.index import Index
from flowrun.cache.manifest import Kept, Manifest, ManifestRow, Part, Parts, write_manifest

pytestmark = pytest.mark.slow

MILLION = 1_000_000
SHARDS, SEGMENT = 8, 1000
MOST_KB = 100_000  # of a process that opens the index and looks up a part of it: a dict of its keys alone would take more


def keys_of(seed: int, count: int) -> np.ndarray:
    """[count, 16] uint8. Every tenth begins as the one before it, so that first halves alone do not tell them apart."""
    keys = np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)
    keys[9::10, :8] = keys[8::10, :8][: len(keys[9::10])]
    return keys


SEGMENTS = {f"s{n}": keys_of(n, MILLION // SHARDS) for n in range(SHARDS)}
SAMPLE = range(0, MILLION // SHARDS, 97)


@pytest.fixture(scope="module")
def index() -> Index:
    return Index.empty().updated(dict.fromkeys(SEGMENTS, 1), SEGMENTS.__getitem__)


def each(keys: np.ndarray) -> list[bytes]:
    joined = keys.tobytes()
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]


def truth(names: list[str], numbers: range = SAMPLE) -> dict[bytes, tuple[str, int]]:
    """Some keys of each segment, and where they are."""
    return {SEGMENTS[name][n].tobytes(): (name, n) for name in names for n in numbers}


def absent(count: int = 5000) -> list[bytes]:
    """Keys that are in no segment; half of them begin as one that is."""
    drawn = keys_of(99, count)
    drawn[::2, :8] = SEGMENTS["s3"][: len(drawn[::2]), :8]
    present = set().union(*map(each, SEGMENTS.values()))
    assert len(present) == MILLION and present.isdisjoint(each(drawn))
    return each(drawn)


def test_present_keys_are_found_where_they_are_and_absent_ones_are_not(index: Index) -> None:
    known, none = truth(list(SEGMENTS)), absent()
    assert len(index) == MILLION and len(known) > 10_000
    assert index.places(list(known)) == list(known.values())
    few = list(known)[::501]  # looked up one by one, not as an array
    assert [index.places([key])[0] for key in few] == [known[key] for key in few]
    assert index.find(none) == [-1] * len(none) and index.find(none[:20]) == [-1] * 20


def test_a_saved_index_is_the_same_when_opened(index: Index, tmp_path: Path) -> None:
    index.save(tmp_path / "index")
    opened, known = Index.load(tmp_path / "index"), truth(list(SEGMENTS))
    assert opened.sizes == index.sizes and opened.places(list(known)) == list(known.values())


def test_a_new_shard_is_added_and_one_that_went_is_forgotten(index: Index) -> None:
    fresh = keys_of(50, SEGMENT)
    present = {**dict.fromkeys([name for name in SEGMENTS if name != "s2"], 1), "new": 1}
    changed = index.updated(present, {"new": fresh}.__getitem__)  # the others' keys are not asked for
    gone, kept = truth(["s2"]), truth([name for name in SEGMENTS if name != "s2"])
    assert len(changed) == MILLION - MILLION // SHARDS + SEGMENT
    assert changed.places(list(gone)) == [None] * len(gone)
    assert changed.places(list(kept)) == list(kept.values())
    assert changed.places([key.tobytes() for key in fresh]) == [("new", n) for n in range(SEGMENT)]


CHILD = """
import sys
from pathlib import Path
from flowrun.cache.index import Index

index = Index.load(Path(sys.argv[1]))
keys = Path(sys.argv[2]).read_bytes()
assert min(index.find([keys[at : at + 16] for at in range(0, len(keys), 16)])) >= 0
print(Path("/proc/self/status").read_text())
"""


def test_opening_and_asking_takes_little_memory(index: Index, tmp_path: Path) -> None:
    index.save(tmp_path / "index")
    (tmp_path / "keys").write_bytes(b"".join(truth(list(SEGMENTS))))
    child = [sys.executable, "-c", CHILD, str(tmp_path / "index"), str(tmp_path / "keys")]
    status = subprocess.run(child, capture_output=True, text=True, check=True).stdout
    assert int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) < MOST_KB


def test_a_manifest_of_a_million_rows_gives_each_row_back(tmp_path: Path) -> None:
    kept = [{Kept(0, "text", "shared", "prompt_embeds"): key} for key in each(SEGMENTS["s0"][:999])]

    def row(n: int) -> ManifestRow:
        return ManifestRow(f"{n:07d}.png", f"caption {n % 1000}", (64, n % 512), n.to_bytes(16, "big"), "", kept[n % 999])

    opened = Manifest(write_manifest(tmp_path, Parts("m", "d", {"x": Part("1", "1")}), list(map(row, range(MILLION)))))
    assert len(opened) == MILLION
    for n in (0, 1, 999, MILLION // 2, MILLION - 1):
        assert opened.row(n) == row(n)
