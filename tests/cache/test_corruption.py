"""pytest tests/cache/test_corruption.py: no changed byte anywhere in a cache gives a wrong value; each is found and named.

Every structural part of every file is hit at its first, middle and last byte, and then 500 places drawn with a seed.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_samples import key_of, same

from flowrun.cache import Cache
from flowrun.cache.catalog import DamagedValue, MissingValue
from flowrun.cache.manifest import Kept, ManifestRow, Part, Parts, newest_manifest, write_manifest
from flowrun.cache.sources import Sources
from flowrun.cache.store import Store
from flowrun.config import Verify

RANDOM_PLACES = 500
VALUES: list[Any] = [
    torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7, torch.arange(5, dtype=torch.bfloat16) / 3,
    torch.tensor(3, dtype=torch.int64), torch.tensor([True, False, True]), "a text with é", None,
    {"a": [1, 2.5, "x"], "b": torch.full((3, 2), 0.1, dtype=torch.float16)},
    torch.randn(40, 30, generator=torch.Generator().manual_seed(0)),
]  # fmt: skip
PARTS = Parts("emoji", "folder", {"text_encoder": Part("12ab", "an encoder")}, {"torch": "2"}, "/data")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two shards, an index, a manifest and remembered sources."""
    root = tmp_path / "cache"
    store = Store(root)
    for half in (range(4), range(4, len(VALUES))):
        with store.writer(64, 30) as writer:
            for number in half:
                writer.put(key_of(number), VALUES[number], f"row {number}", "shared.value")
    store.catalog.save_index()
    kept = Kept(0, "unit", "shared", "value")
    rows = [ManifestRow(f"row {n}", f"caption {n}", (32, 48), bytes([n] * 16), "", {kept: key_of(n)}) for n in range(len(VALUES))]
    write_manifest(root, PARTS, rows)
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"content")
    time.sleep(0.03)  # what changed just now is not remembered
    with Sources(root, Verify.first_read) as sources:
        sources.hash_file(picture)
    return root


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.safetensors"))


def parts_of(file: Path) -> Iterator[tuple[str, int, int]]:
    """(what, first byte, end) of everything that a file consists of."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    yield "length of the header", 0, 8
    yield "header", 8, 8 + size
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__" and entry["data_offsets"][0] < entry["data_offsets"][1]:
            yield name, 8 + size + entry["data_offsets"][0], 8 + size + entry["data_offsets"][1]


def wrong_values(root: Path, verify: Verify) -> list[int]:
    """Values that are read without an error and are not what was stored."""
    store, wrong = Store(root, verify), []
    for number, value in enumerate(VALUES):
        try:
            if not same(store.get(key_of(number)), value):
                wrong.append(number)
        except (MissingValue, DamagedValue):
            pass
    return wrong


def flip(file: Path, at: int, bit: int) -> None:
    with open(file, "r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ (1 << bit)]))


def places(root: Path) -> Iterator[tuple[Path, str, int, int]]:
    """(file, part, byte, bit)."""
    drawn = random.Random(0)
    every = [(file, *part) for file in files(root) for part in parts_of(file)]
    for file, what, begin, end in every:
        for at in {begin, (begin + end) // 2, end - 1}:
            yield file, what, at, drawn.randrange(8)
    for _ in range(RANDOM_PLACES):
        file = drawn.choice(files(root))
        at = drawn.randrange(file.stat().st_size)
        what = next(what for name, what, begin, end in every if name == file and begin <= at < end)
        yield file, what, at, drawn.randrange(8)


def test_every_byte_of_every_file_belongs_to_a_part(cache: Path) -> None:
    for file in files(cache):
        covered = sorted((begin, end) for _, begin, end in parts_of(file))
        assert covered[0][0] == 0 and covered[-1][1] == file.stat().st_size
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(covered))
    assert {path.parent.name for path in files(cache)} == {"cache", "shards", "manifests", "sources"}


def test_a_changed_byte_never_gives_a_wrong_value_and_is_named(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Cache(cache).verify() == [] and wrong_values(cache, Verify.first_read) == []
    hit = set()
    for file, what, at, bit in list(places(cache)):
        caplog.clear()
        flip(file, at, bit)
        with caplog.at_level(logging.WARNING):
            assert wrong_values(cache, Verify.first_read) == [], (file.name, what, at)
            found = Cache(cache).verify()
            Sources(cache, Verify.first_read)
            newest_manifest(cache, "emoji", "folder", "/data")
        told = caplog.text + " ".join(finding.where for finding in found)
        assert file.name in told, (what, at)
        assert all(finding.rows for finding in found if finding.key is not None)
        hit.add((file.parent.name, what))
        flip(file, at, bit)
        for fault in (cache / "quarantine").iterdir():
            fault.unlink()
        assert Cache(cache).verify() == [], "it is as it was"
    assert len(hit) == sum(1 for file in files(cache) for _ in parts_of(file)) - len(twice(cache))


def twice(root: Path) -> list[str]:
    """Parts of the second shard that have the name of one of the first."""
    first, second = ([what for what, _, _ in parts_of(file)] for file in files(root / "shards"))
    return [what for what in second if what in first]


def test_without_checksums_the_same_changes_do_give_wrong_values(cache: Path) -> None:
    """The control: it is the checksums that protect the values."""
    wrong = 0
    for file, what, at, bit in places(cache):
        if what.startswith("values/"):
            flip(file, at, bit)
            wrong += bool(wrong_values(cache, Verify.never))
            flip(file, at, bit)
    assert wrong > 20
