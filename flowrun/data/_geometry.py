"""From a picture's own size to the size that is trained on: one fixed size, or the picture's own cut to a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from PIL import Image, ImageOps

from flowrun.config import ConfigError

RESIZING = 1  # raise when a picture may come out with other pixels than before


class Mode(Enum):
    fixed = "fixed"  # every picture: scaled until it covers `size`, then its middle is cut out
    keep = "keep"  # each picture's own size, its middle cut out on the grid of `multiple_of`


@dataclass(kw_only=True, slots=True)
class Geometry:
    """Sizes are [height, width] in pixels; `multiple_of` is what the model's latents and patches need."""

    mode: Mode
    size: list[int] | None  # fixed only
    multiple_of: int
    max_area: int | None  # keep only: larger pictures are scaled down to this many pixels first; null: never

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ConfigError("data.geometry.multiple_of", f"is {self.multiple_of}", "give 1 or more pixels")
        self._check_size() if self.mode is Mode.fixed else self._check_area()

    def target(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) that a picture of the given size comes out with. Raises ValueError when it is too small."""
        if self.mode is Mode.fixed:
            return self.size[0], self.size[1]
        height, width = self._scaled(height, width)
        grid = self.multiple_of
        if min(height, width) < grid:
            raise ValueError(f"is {height}x{width}, smaller than data.geometry.multiple_of = {grid}")
        return height - height % grid, width - width % grid

    def apply(self, picture: Image.Image) -> Image.Image:
        height, width = self.target(picture.height, picture.width)
        if self.mode is Mode.fixed:
            return ImageOps.fit(picture, (width, height), method=Image.Resampling.LANCZOS)
        scaled_height, scaled_width = self._scaled(picture.height, picture.width)
        picture = picture.resize((scaled_width, scaled_height), Image.Resampling.LANCZOS)
        left, top = (scaled_width - width) // 2, (scaled_height - height) // 2
        return picture.crop((left, top, left + width, top + height))

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        if self.max_area is None or height * width <= self.max_area:
            return height, width
        factor = math.sqrt(self.max_area / (height * width))
        return max(1, math.floor(height * factor)), max(1, math.floor(width * factor))

    def _check_size(self) -> None:
        key = "data.geometry.size"
        if self.max_area is not None:
            raise ConfigError("data.geometry.max_area", "has no effect with mode fixed", "set it to null")
        if self.size is None or len(self.size) != 2:
            raise ConfigError(key, f"is {self.size}", "mode fixed needs [height, width] in pixels")
        if any(side < 1 or side % self.multiple_of for side in self.size):
            raise ConfigError(
                key, f"is {self.size}", f"both sides must be multiples of multiple_of = {self.multiple_of}"
            )

    def _check_area(self) -> None:
        if self.size is not None:
            raise ConfigError("data.geometry.size", "has no effect with mode keep", "set it to null")
        if self.max_area is not None and self.max_area < self.multiple_of**2:
            least = f"give at least multiple_of squared = {self.multiple_of**2}"
            raise ConfigError("data.geometry.max_area", f"is {self.max_area}", least)
