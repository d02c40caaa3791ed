"""From a picture's own size to the size that is trained on: one size for all, its own cut to a grid, or a bucket's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from PIL import Image, ImageOps

from flowrun.config import ConfigError

RESIZING = 1  # raise when a picture may come out with other pixels than before


class Mode(Enum):
    fixed = "fixed"  # every picture: scaled until it covers `size`, then its middle is cut out
    keep = "keep"  # each picture's own size, its middle cut out on the grid of `multiple_of`
    buckets = "buckets"  # the bucket of about `area` pixels that is nearest in shape: scaled until it covers it, cut


@dataclass(kw_only=True, slots=True)
class Geometry:
    """Sizes are [height, width] in pixels; `multiple_of` is what the model's latents and patches need."""

    mode: Mode
    size: list[int] | None  # fixed only
    multiple_of: int
    max_area: int | None  # keep only: larger pictures are scaled down to this many pixels first; null: never
    area: int | None  # buckets only: most pixels of a bucket
    max_aspect: float | None  # buckets only: longest side / shortest side; longer pictures lose their ends
    upscale: bool | None  # buckets only: whether pictures smaller than their bucket are enlarged, or keep their own size

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ConfigError("data.geometry.multiple_of", f"is {self.multiple_of}", "give 1 or more pixels")
        self._check_used()
        {Mode.fixed: self._check_size, Mode.keep: self._check_max_area, Mode.buckets: self._check_buckets}[self.mode]()

    def target(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) that a picture of the given size comes out with. Raises ValueError when it is too small."""
        if self.mode is Mode.fixed:
            return self.size[0], self.size[1]
        if self.mode is Mode.buckets and (bucket := self._bucket(height, width)) is not None:
            return bucket
        height, width = self._scaled(*self._within_aspect(height, width))
        grid = self.multiple_of
        if min(height, width) < grid:
            raise ValueError(f"is {height}x{width}, smaller than data.geometry.multiple_of = {grid}")
        return height - height % grid, width - width % grid

    def apply(self, picture: Image.Image, size: tuple[int, int], at: tuple[float, float] = (0.5, 0.5)) -> Image.Image:
        """size: what `target` gave for the row; a row's further pictures are cut to it too. at: where the cut lies, from
        (0, 0), left and top, to (1, 1)."""
        if self.mode is Mode.keep and size == self.target(picture.height, picture.width):
            return self._cut(picture, size, at)
        return ImageOps.fit(picture, size[::-1], method=Image.Resampling.LANCZOS, centering=at)

    def _cut(self, picture: Image.Image, size: tuple[int, int], at: tuple[float, float]) -> Image.Image:
        height, width = self._scaled(picture.height, picture.width)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
        left, top = math.floor((width - size[1]) * at[0]), math.floor((height - size[0]) * at[1])
        return picture.crop((left, top, left + size[1], top + size[0]))

    def _within_aspect(self, height: int, width: int) -> tuple[int, int]:
        if self.max_aspect is None:
            return height, width
        return min(height, int(width * self.max_aspect)), min(width, int(height * self.max_aspect))

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        most = self.area if self.mode is Mode.buckets else self.max_area
        if most is None or height * width <= most:
            return height, width
        factor = math.sqrt(most / (height * width))
        return max(1, math.floor(height * factor)), max(1, math.floor(width * factor))

    def _bucket(self, height: int, width: int) -> tuple[int, int] | None:
        """None when the picture would have to be enlarged."""
        nearest = _nearest(self.area, self.multiple_of, self.max_aspect, height, width)
        enlarged = nearest[0] > height or nearest[1] > width
        return None if enlarged and not self.upscale else nearest

    def _check_used(self) -> None:
        """What a mode does not read is null."""
        read = {Mode.fixed: ("size",), Mode.keep: ("max_area",), Mode.buckets: ("area", "max_aspect", "upscale")}
        for name in (name for names in read.values() for name in names):
            given = getattr(self, name) is not None
            if given and name not in read[self.mode]:
                raise ConfigError(f"data.geometry.{name}", f"has no effect with mode {self.mode.value}", "set it to null")
            if not given and name in read[self.mode] and name != "max_area":
                raise ConfigError(f"data.geometry.{name}", "is null", f"mode {self.mode.value} needs a value")

    def _check_size(self) -> None:
        if len(self.size) != 2:
            raise ConfigError("data.geometry.size", f"is {self.size}", "mode fixed needs [height, width] in pixels")
        if any(side < 1 or side % self.multiple_of for side in self.size):
            raise ConfigError(
                "data.geometry.size",
                f"is {self.size}",
                f"both sides must be multiples of multiple_of = {self.multiple_of}",
            )

    def _check_max_area(self) -> None:
        if self.max_area is not None:
            self._check_area("max_area", self.max_area)

    def _check_buckets(self) -> None:
        self._check_area("area", self.area)
        if self.max_aspect < 1:
            raise ConfigError("data.geometry.max_aspect", f"is {self.max_aspect:g}", "give 1 (squares only) or more")

    def _check_area(self, name: str, area: int) -> None:
        if area < self.multiple_of**2:
            least = f"give at least multiple_of squared = {self.multiple_of**2}"
            raise ConfigError(f"data.geometry.{name}", f"is {area}", least)


@lru_cache(maxsize=1 << 16)
def _nearest(area: int, multiple_of: int, max_aspect: float, height: int, width: int) -> tuple[int, int]:
    """The bucket that is nearest in log(width / height), the larger of two."""
    sizes = buckets(area, multiple_of, max_aspect)
    return min(sizes, key=lambda size: (abs(math.log(size[1] / size[0] * height / width)), -size[0] * size[1]))


@lru_cache(maxsize=8)
def buckets(area: int, multiple_of: int, max_aspect: float) -> tuple[tuple[int, int], ...]:
    """All (height, width) on the grid to which no further row or column can be added within `area`, and whose sides
    differ by `max_aspect` at most; in order of height."""
    found = set()
    for side in range(multiple_of, math.isqrt(area) + 1, multiple_of):
        other = area // side // multiple_of * multiple_of
        if other <= side * max_aspect:
            found |= {(side, other), (other, side)}
    if not found:  # an aspect limit below what the grid can do beside a square
        side = math.isqrt(area) // multiple_of * multiple_of
        found = {(side, side)}
    return tuple(sorted(found))
