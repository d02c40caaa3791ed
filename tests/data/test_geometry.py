"""From a picture's size to the trained size.   pytest tests/data/test_geometry.py"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowrun.config import ConfigError
from flowrun.data._geometry import Geometry, Mode, buckets


def geometry_of(mode: Mode, **changes: Any) -> Geometry:
    unused = dict.fromkeys(("size", "max_area", "area", "max_aspect", "upscale"))
    return Geometry(**{**unused, "mode": mode, "multiple_of": 8, **changes})


def fixed(height: int, width: int, multiple_of: int = 1) -> Geometry:
    return geometry_of(Mode.fixed, size=[height, width], multiple_of=multiple_of)


def keep(multiple_of: int, max_area: int | None = None) -> Geometry:
    return geometry_of(Mode.keep, multiple_of=multiple_of, max_area=max_area)


def bucketed(area: int, multiple_of: int, max_aspect: float, upscale: bool = True) -> Geometry:
    return geometry_of(Mode.buckets, area=area, multiple_of=multiple_of, max_aspect=max_aspect, upscale=upscale)


def apply(geometry: Geometry, picture: Image.Image) -> Image.Image:
    return geometry.apply(picture, geometry.target(picture.height, picture.width))


def coordinates(height: int, width: int) -> Image.Image:
    """A picture whose red is its row and whose green is its column."""
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([rows, columns, 0 * rows], axis=2).astype(np.uint8))


def test_fixed_gives_the_middle_of_the_picture_at_the_asked_size() -> None:
    cut = np.asarray(apply(fixed(32, 32), coordinates(32, 64)))
    assert np.array_equal(cut, np.asarray(coordinates(32, 64))[:, 16:48])
    cut = np.asarray(apply(fixed(16, 8), coordinates(64, 64)))  # scaled by 4: columns 16 to 48 remain
    assert cut.shape == (16, 8, 3)
    assert abs(cut[..., 1].min() - 17.5) <= 1.5 and abs(cut[..., 1].max() - 45.5) <= 1.5


def test_fixed_enlarges_small_pictures_and_leaves_fitting_ones_alone() -> None:
    assert apply(fixed(32, 32), coordinates(5, 7)).size == (32, 32)
    assert np.array_equal(np.asarray(apply(fixed(20, 30), coordinates(20, 30))), np.asarray(coordinates(20, 30)))


def test_keep_cuts_the_middle_on_the_grid_without_scaling() -> None:
    cut = np.asarray(apply(keep(8), coordinates(21, 34)))
    assert np.array_equal(cut, np.asarray(coordinates(21, 34))[2:18, 1:33])


@pytest.mark.parametrize("size", [(8, 8), (21, 34), (100, 9), (37, 64), (513, 511)])
@pytest.mark.parametrize("geometry", [fixed(32, 24), keep(8), keep(8, 1024), keep(1, 400), bucketed(1024, 8, 2),
                                      bucketed(1024, 8, 2, False), bucketed(700, 1, 1)])  # fmt: skip
def test_the_announced_size_is_the_size_that_comes_out(size: tuple[int, int], geometry: Geometry) -> None:
    try:
        announced = geometry.target(*size)
    except ValueError:
        assert geometry.mode is Mode.keep
        return
    applied = apply(geometry, Image.new("RGB", size[::-1]))
    assert (applied.height, applied.width) == announced
    assert not any(side % geometry.multiple_of for side in announced)
    assert announced[0] * announced[1] <= (geometry.max_area or geometry.area or math.inf)


def test_max_area_keeps_the_aspect() -> None:
    height, width = keep(1, 10_000).target(400, 1600)
    assert (height, width) == (50, 200)


def test_keep_refuses_what_is_smaller_than_the_grid() -> None:
    with pytest.raises(ValueError, match="is 7x100, smaller than data.geometry.multiple_of = 8"):
        keep(8).target(7, 100)


def test_further_pictures_of_a_row_come_out_at_the_size_of_the_first() -> None:
    for geometry in (fixed(32, 24), keep(8), bucketed(1024, 8, 2)):
        size = geometry.target(40, 50)
        assert geometry.apply(Image.new("RGB", (90, 20)), size).size == size[::-1]


def test_buckets_fill_the_area_and_keep_the_aspect() -> None:
    """Against all grid sizes: none within area and aspect holds a bucket and more."""
    for area, grid, aspect in ((1024 * 1024, 64, 2.0), (512 * 512, 64, 2.5), (1024, 8, 4.0)):
        sides = range(grid, area // grid + 1, grid)
        allowed = {(h, w) for h in sides for w in sides if h * w <= area and max(h, w) <= aspect * min(h, w)}
        found = set(buckets(area, grid, aspect))
        assert found <= allowed and {(w, h) for h, w in found} == found
        larger = {(h + more, w) for h, w in found for more in sides} | {(h, w + more) for h, w in found for more in sides}
        assert not larger & allowed
        side = math.isqrt(area) // grid * grid
        assert (side, side) in found


def test_a_picture_goes_to_the_bucket_of_its_shape() -> None:
    geometry = bucketed(1024 * 1024, 64, 2.0)
    assert geometry.target(1080, 1920) == (768, 1344)
    assert geometry.target(1920, 1080) == (1344, 768)
    assert geometry.target(3000, 3001) == (1024, 1024)
    assert geometry.target(200, 9000) == (768, 1344), "beyond the limit of the aspect its ends are lost"
    assert geometry.target(50, 50) == (1024, 1024)


def test_without_enlarging_small_pictures_keep_their_own_size() -> None:
    geometry = bucketed(1024 * 1024, 64, 2.0, upscale=False)
    assert geometry.target(600, 650) == (576, 640)
    assert geometry.target(1080, 1920) == (768, 1344)
    assert geometry.target(200, 9000) == (192, 384)
    with pytest.raises(ValueError, match="is 50x50, smaller than data.geometry.multiple_of = 64"):
        geometry.target(50, 50)


def test_a_bucket_is_filled_by_the_middle_of_the_picture() -> None:
    cut = np.asarray(apply(bucketed(32 * 32, 32, 1), coordinates(32, 64)))
    assert np.array_equal(cut, np.asarray(coordinates(32, 64))[:, 16:48])


@pytest.mark.parametrize(
    ("mode", "settings", "message"),
    [
        (Mode.fixed, {}, "data.geometry.size: is null; mode fixed needs"),
        (Mode.fixed, {"size": [32]}, "data.geometry.size"),
        (Mode.fixed, {"size": [32, 36]}, "multiples of multiple_of = 8"),
        (Mode.fixed, {"size": [32, 32], "max_area": 99}, "data.geometry.max_area: has no effect with mode fixed"),
        (Mode.keep, {"size": [32, 32]}, "data.geometry.size: has no effect with mode keep"),
        (Mode.keep, {"max_area": 63}, "data.geometry.max_area: is 63; give at least multiple_of squared = 64"),
        (Mode.keep, {"multiple_of": 0}, "data.geometry.multiple_of: is 0"),
        (Mode.keep, {"upscale": False}, "data.geometry.upscale: has no effect with mode keep"),
        (Mode.buckets, {"area": 1024, "max_aspect": 2.0}, "data.geometry.upscale: is null; mode buckets needs"),
        (Mode.buckets, {"area": 63, "max_aspect": 2.0, "upscale": True}, "data.geometry.area: is 63"),
        (Mode.buckets, {"area": 64, "max_aspect": 0.5, "upscale": True}, "data.geometry.max_aspect: is 0.5; give 1"),
    ],
)
def test_settings_that_contradict_or_do_nothing_are_refused(mode: Mode, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        geometry_of(mode, **settings)
