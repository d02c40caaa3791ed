"""Variants of rows: fixed by row and number, spread as configured, and never a single frozen draw."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_folder import KEEP, PLAIN, TAGS, WHOLE, add, by_content, make

from flowrun.config import ConfigError
from flowrun.data import Row
from flowrun.variants import Variants

FEW = {**KEEP, "multiple_of": 8}


def augmented(path: Path, variants: int, caption: dict[str, Any] | None = None, **changes: Any) -> Any:
    tags = {**TAGS, **(caption or {})}
    return make(path, geometry=FEW, augment={**PLAIN, "variants": variants, "caption": tags, **changes},
                caption={**WHOLE, "lines": "each"})  # fmt: skip


def coordinates(path: Path, height: int, width: int) -> None:
    """A picture whose red is its row and whose green is its column."""
    rows, columns = np.mgrid[0:height, 0:width]
    Image.fromarray(np.stack([rows, columns, 0 * rows], axis=2).astype(np.uint8)).save(path)


def looks(source: Any, row: Row) -> list[torch.Tensor]:
    return [source.load(source.variant(row, n))["image"] for n in range(source.variants)]


def test_a_flipped_variant_is_the_mirror_of_the_picture_and_about_its_share_is(tmp_path: Path) -> None:
    add(tmp_path / "a.png")
    coordinates(tmp_path / "a.png", 16, 24)
    (plain,) = make(tmp_path, geometry=FEW).rows()
    upright = make(tmp_path, geometry=FEW).load(plain)["image"]
    source = augmented(tmp_path, 200, flip=0.3)
    (row,) = source.rows()
    mirrored = [torch.equal(look, upright.flip(2)) for look in looks(source, row)]
    assert all(torch.equal(look, upright) or flipped for look, flipped in zip(looks(source, row), mirrored, strict=True))
    assert 0.3 - 4 * (0.21 / 200) ** 0.5 < sum(mirrored) / 200 < 0.3 + 4 * (0.21 / 200) ** 0.5


def test_a_random_crop_is_any_part_of_the_right_size(tmp_path: Path) -> None:
    add(tmp_path / "a.png")
    coordinates(tmp_path / "a.png", 21, 30)  # 16 x 24 is cut out: 6 and 7 places
    source = augmented(tmp_path, 300, crop=True)
    (row,) = source.rows()
    found = {(int(look[0, 0, 0]), int(look[1, 0, 0])) for look in looks(source, row)}
    assert all(look.shape == (3, 16, 24) for look in looks(source, row))
    assert {top for top, _ in found} >= set(range(5)) and {left for _, left in found} >= set(range(6))
    assert all(top <= 5 and left <= 6 for top, left in found)


def test_variants_are_the_same_in_every_run_and_differ_between_rows(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        add(tmp_path / name, "1, 2, 3, 4, 5, 6")
    first, second = (augmented(tmp_path, 8, flip=0.5, crop=True, caption={"shuffle": True}) for _ in range(2))
    seen = [[[source.variant(row, n).extra["look"] for n in range(8)] for row in source.rows()] for source in (first, second)]
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1] and len(set(seen[0][0])) == 8


def test_all_pictures_of_a_row_are_changed_alike(tmp_path: Path) -> None:
    from test_table import make as table

    coordinates(tmp_path / "a.png", 21, 30)
    (tmp_path / "t.csv").write_text("a,b,text\na.png,a.png,x\n")
    columns = {"id": None, "caption": "text", "pictures": {"image": "a", "condition_image": "b"}}
    source = table(tmp_path / "t.csv", columns=columns, geometry=FEW,
                   augment={**PLAIN, "variants": 9, "flip": 0.5, "crop": True})  # fmt: skip
    (row,) = source.rows()
    loaded = [source.load(source.variant(row, n)) for n in range(9)]
    assert all(torch.equal(one["image"], one["condition_image"]) for one in loaded)
    assert len({one["image"].numpy().tobytes() for one in loaded}) > 3


def test_one_of_several_captions_is_drawn_or_each_is_a_row(tmp_path: Path) -> None:
    add(tmp_path / "a.png", "one\ntwo\nthree")
    assert [row.prompt for row in augmented(tmp_path, 1).rows()] == ["one", "two", "three"]
    source = augmented(tmp_path, 60, caption={"several": "random"})
    (row,) = source.rows()
    count = Counter(source.variant(row, n).prompt for n in range(60))
    assert set(count) == {"one", "two", "three"} and min(count.values()) > 8
    assert source.load(source.variant(row, 0))["prompt"] == source.variant(row, 0).prompt


def test_tags_are_shuffled_and_dropped_but_the_first_stay(tmp_path: Path) -> None:
    add(tmp_path / "a.png", "cat,  red ,blue, green")
    source = augmented(tmp_path, 100, caption={"shuffle": True, "drop": 0.4, "keep": 1})
    (row,) = source.rows()
    prompts = [source.variant(row, n).prompt for n in range(100)]
    parts = [prompt.split(", ") for prompt in prompts]
    assert all(tags[0] == "cat" and set(tags[1:]) <= {"red", "blue", "green"} and len(set(tags)) == len(tags) for tags in parts)
    assert {tags[1] for tags in parts if len(tags) > 1} == {"red", "blue", "green"}
    kept = sum(len(tags) - 1 for tags in parts) / 300
    assert abs(kept - 0.6) < 4 * (0.24 / 300) ** 0.5
    nothing_kept = augmented(tmp_path, 100, caption={"drop": 0.9, "keep": 0})
    assert all(nothing_kept.variant(row, n).prompt for n in range(100)), "a caption never becomes empty"


def test_equal_variants_share_a_key_and_an_unchanged_one_has_that_of_plain_data(tmp_path: Path) -> None:
    add(tmp_path / "a.png")
    plain, source = make(tmp_path, geometry=FEW), augmented(tmp_path, 16, flip=0.5)
    (row,) = source.rows()
    keys = [source.fingerprints(source.variant(row, n), by_content)["image"] for n in range(16)]
    flipped = [source.variant(row, n).extra["look"].flipped for n in range(16)]
    assert len(set(keys)) == 2 and len(set(flipped)) == 2
    assert {key for key, is_flipped in zip(keys, flipped, strict=True) if not is_flipped} == {
        plain.fingerprints(plain.rows()[0], by_content)["image"]
    }


def test_visits_take_every_variant_equally_often_together_with_the_algorithms_changes(tmp_path: Path) -> None:
    add(tmp_path / "a.png")
    source = augmented(tmp_path, 4, crop=True)
    variants = Variants(source, [{}, {"prompt": ""}], lambda seed, row, epoch: int(epoch % 5 == 0))
    count = Counter(variants.choose(0, "a.png", epoch) for epoch in range(4000))
    assert len(variants) == 8
    dropped = sum(n for index, n in count.items() if variants.change(index))
    assert dropped == 800
    for number in range(4):
        mine = sum(n for index, n in count.items() if index // 2 == number)
        assert abs(mine - 1000) < 5 * (4000 * 3 / 16) ** 0.5


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ({"flip": 0.5, "crop": True}, "data.augment.variants: is 1, so that flip, crop would be drawn once and stay for ever; give 2"),
        ({"caption": {**TAGS, "shuffle": True}}, "data.augment.variants: is 1, so that caption would be"),
        ({"variants": 4}, "data.augment.variants: is 4, but nothing varies"),
        ({"variants": 0}, "data.augment.variants: is 0"),
        ({"variants": 2, "flip": 1.5}, "data.augment.flip: is 1.5"),
        ({"variants": 2, "caption": {**TAGS, "drop": 1.0}}, "data.augment.caption.drop: is 1.0"),
        ({"variants": 2, "caption": {**TAGS, "keep": -1}}, "data.augment.caption.keep: is -1"),
        ({"variants": 2, "caption": {**TAGS, "separator": ""}}, "data.augment.caption.separator: is empty"),
    ],
)
def test_settings_that_would_freeze_a_draw_or_do_nothing_are_refused(augment: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, augment={**PLAIN, **augment})
