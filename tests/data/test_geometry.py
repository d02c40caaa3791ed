"""From a picture's size to the trained size.   pytest tests/data/test_geometry.py"""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from flowrun.config import ConfigError
from flowrun.data._geometry import Geometry, Mode


def fixed(height: int, width: int, multiple_of: int = 1) -> Geometry:
    return Geometry(mode=Mode.fixed, size=[height, width], multiple_of=multiple_of, max_area=None)


def keep(multiple_of: int, max_area: int | None = None) -> Geometry:
    return Geometry(mode=Mode.keep, size=None, multiple_of=multiple_of, max_area=max_area)


def coordinates(height: int, width: int) -> Image.Image:
    """A picture whose red is its row and whose green is its column."""
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([rows, columns, 0 * rows], axis=2).astype(np.uint8))


def test_fixed_gives_the_middle_of_the_picture_at_the_asked_size() -> None:
    cut = np.asarray(fixed(32, 32).apply(coordinates(32, 64)))
    assert np.array_equal(cut, np.asarray(coordinates(32, 64))[:, 16:48])
    cut = np.asarray(fixed(16, 8).apply(coordinates(64, 64)))  # scaled by 4: columns 16 to 48 remain
    assert cut.shape == (16, 8, 3)
    assert abs(cut[..., 1].min() - 17.5) <= 1.5 and abs(cut[..., 1].max() - 45.5) <= 1.5


def test_fixed_enlarges_small_pictures_and_leaves_fitting_ones_alone() -> None:
    assert fixed(32, 32).apply(coordinates(5, 7)).size == (32, 32)
    assert np.array_equal(np.asarray(fixed(20, 30).apply(coordinates(20, 30))), np.asarray(coordinates(20, 30)))


def test_keep_cuts_the_middle_on_the_grid_without_scaling() -> None:
    cut = np.asarray(keep(8).apply(coordinates(21, 34)))
    assert np.array_equal(cut, np.asarray(coordinates(21, 34))[2:18, 1:33])


@pytest.mark.parametrize("size", [(8, 8), (21, 34), (100, 9), (37, 64), (513, 511)])
@pytest.mark.parametrize("geometry", [fixed(32, 24), keep(8), keep(8, 1024), keep(1, 400)])
def test_the_announced_size_is_the_size_that_comes_out(size: tuple[int, int], geometry: Geometry) -> None:
    try:
        announced = geometry.target(*size)
    except ValueError:
        assert geometry.mode is Mode.keep
        return
    applied = geometry.apply(Image.new("RGB", size[::-1]))
    assert (applied.height, applied.width) == announced
    assert not any(side % geometry.multiple_of for side in announced)
    assert geometry.max_area is None or announced[0] * announced[1] <= geometry.max_area


def test_max_area_keeps_the_aspect() -> None:
    height, width = keep(1, 10_000).target(400, 1600)
    assert (height, width) == (50, 200)


def test_keep_refuses_what_is_smaller_than_the_grid() -> None:
    with pytest.raises(ValueError, match="is 7x100, smaller than data.geometry.multiple_of = 8"):
        keep(8).target(7, 100)


@pytest.mark.parametrize(
    ("mode", "size", "multiple_of", "max_area", "message"),
    [
        (Mode.fixed, None, 8, None, "data.geometry.size: is None; mode fixed needs"),
        (Mode.fixed, [32], 8, None, "data.geometry.size"),
        (Mode.fixed, [32, 36], 8, None, "multiples of multiple_of = 8"),
        (Mode.fixed, [32, 32], 8, 99, "data.geometry.max_area: has no effect with mode fixed"),
        (Mode.keep, [32, 32], 8, None, "data.geometry.size: has no effect with mode keep"),
        (Mode.keep, None, 8, 63, "data.geometry.max_area: is 63; give at least multiple_of squared = 64"),
        (Mode.keep, None, 0, None, "data.geometry.multiple_of: is 0"),
    ],
)
def test_settings_that_contradict_or_do_nothing_are_refused(
    mode: Mode, size: list[int] | None, multiple_of: int, max_area: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Geometry(mode=mode, size=size, multiple_of=multiple_of, max_area=max_area)
