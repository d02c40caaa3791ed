"""pytest tests/cache/test_shard.py: a shard is a plain safetensors file, small, and damage to it is noticed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from cache_samples import fill, flip, key_of, same, shard_files, value_of
from safetensors import safe_open

from flowrun.cache.shard import Leaf, Shard, checksum
from flowrun.cache.store import Store
from flowrun.cache.tensorfile import Damaged
from tests.test_readme import block


def test_the_readme_s_recipe_reads_a_shard_with_the_safetensors_package_alone(root: Path) -> None:
    values = {
        0: value_of(0),
        1: "a red cat",
        2: [value_of(2).bfloat16(), torch.arange(3)],
        3: value_of(3),
        4: torch.zeros(0, 5),
    }
    with Store(root).writer(64, 30) as writer:
        for number, value in values.items():
            writer.put(key_of(number), value, f"row {number // 2}", "shared.x")
    recipe: dict = {}
    exec(block("python", "def read_shard"), recipe)
    found = {key: (row, text, tensors) for key, row, text, tensors in recipe["read_shard"](shard_files(root)[0])}
    assert list(found) == [key_of(number).hex() for number in values]
    assert [row for row, _, _ in found.values()] == ["row 0", "row 0", "row 1", "row 1", "row 2"]
    assert json.loads(found[key_of(1).hex()][1]) == "a red cat"
    expected = {0: [values[0]], 1: [], 2: values[2], 3: [values[3]], 4: [values[4]]}
    for number, tensors in expected.items():
        assert same(found[key_of(number).hex()][2], tensors)


def test_equal_kinds_lie_in_one_column_whatever_their_length(root: Path) -> None:
    lengths = [3, 0, 7, 1]
    with Store(root).writer(64, 30) as writer:
        for number, length in enumerate(lengths):
            writer.put(key_of(number), torch.full((length, 6), float(number)), "row", "shared.text")
    with safe_open(shard_files(root)[0], "pt") as file:
        column = file.get_tensor("values/shared.text/F32/6")
    assert same(column, torch.cat([torch.full((length, 6), float(n)) for n, length in enumerate(lengths)]))


def test_a_sample_costs_at_most_128_bytes_and_half_a_percent_more_than_its_payload(root: Path) -> None:
    rows, payload = 400, 0
    store = Store(root)
    with store.writer(64, 30) as writer:
        for row in range(rows):
            values = [torch.randn(4, 8, 8).bfloat16(), torch.randn(12, 90).bfloat16()]
            payload += sum(value.nbytes for value in values)
            for at, value in enumerate(values):
                writer.put(key_of(2 * row + at), value, f"images/{row:06d}.png", f"shared.{at}")
    (shard,) = shard_files(root)
    assert shard.stat().st_size <= payload * 1.005 + 128 * rows


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_modes_follow_the_umask(root: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        fill(root, range(2), per_shard=1).merge()
    finally:
        os.umask(before)
    files = [*shard_files(root), root / "index.safetensors"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [mode, mode]


def test_any_changed_byte_outside_the_values_is_noticed_when_the_shard_is_opened(root: Path) -> None:
    fill(root, range(3), per_shard=3)
    (path,) = shard_files(root)
    whole = path.read_bytes()
    values = [value_of(n).numpy().tobytes() for n in range(3)]
    inside = {at for value in values for at in range(whole.index(value), whole.index(value) + len(value))}
    noticed = 0
    for at in range(0, len(whole), 7):
        if at in inside:
            continue
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(Damaged):
            Shard(path)
        noticed += 1
    assert noticed > 100
    path.write_bytes(whole)
    assert len(Shard(path)) == 3


def test_any_changed_byte_of_a_value_fails_that_values_checksum_alone(root: Path) -> None:
    fill(root, range(3), per_shard=3)
    (path,) = shard_files(root)
    whole = path.read_bytes()
    begin = whole.index(value_of(1).numpy().tobytes())
    for at in range(begin, begin + value_of(1).nbytes, 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x01]) + whole[at + 1 :])
        shard = Shard(path)
        intact = [shard.is_intact(n) for n in range(3)]
        assert intact == [True, False, True]


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -100, -1])
def test_a_file_cut_short_is_noticed(root: Path, keep: int) -> None:
    fill(root, range(3), per_shard=3)
    (path,) = shard_files(root)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Damaged, match=path.name):
        Shard(path)


def test_sizes_are_the_bytes_of_tensors_and_text(root: Path) -> None:
    with Store(root).writer(64, 30) as writer:
        writer.put(key_of(0), torch.zeros(4, 3, dtype=torch.int16), "row")
        writer.put(key_of(1), "é", "row")
        writer.put(key_of(2), [torch.zeros(()), torch.zeros(2)], "row")
    shard = Shard(shard_files(root)[0])
    texts = [len('{"tensor": 0}'), len('"\\u00e9"'), len('{"list": [{"tensor": 0}, {"tensor": 1}]}')]
    assert shard.sizes().tolist() == [24 + texts[0], texts[1], 12 + texts[2]]


def test_flipping_is_really_a_change(root: Path) -> None:
    fill(root, range(1), per_shard=1)
    (path,) = shard_files(root)
    before = path.read_bytes()
    flip(path, 100)
    assert path.read_bytes() != before and len(path.read_bytes()) == len(before)


def test_the_checksum_covers_address_text_type_shape_and_bytes() -> None:
    data = bytes(range(8))
    base = (b"k" * 16, '{"tensor": 0}', [Leaf("F32", (2,), data)])
    others = [
        (b"l" * 16, *base[1:]),
        (base[0], '{"list": [{"tensor": 0}]}', base[2]),
        (*base[:2], [Leaf("I32", (2,), data)]),
        (*base[:2], [Leaf("F32", (2, 1), data)]),
        (*base[:2], [Leaf("F32", (2,), data[::-1])]),
        (*base[:2], []),
    ]
    assert len({checksum(*value) for value in (base, *others)}) == 7 and checksum(*base) == checksum(*base)
