"""Whether a picture is nearest to the data's own picture of its caption, among all of the data's pictures of its size.

Distance is the mean squared error of pixels in [-1, 1]. It measures what a small model knows by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from flowrun.config import ConfigError
from flowrun.data import Row, Source, make_source
from flowrun.nearest import matches, pictures_of
from flowrun.rewards import Reward


class Measure(Enum):
    hit = "hit"  # 1 when the nearest picture has the caption, else 0
    mse = "mse"  # minus the distance to the (nearest) picture of the caption


class Nearest(Reward):
    @dataclass(kw_only=True, slots=True)
    class Config:
        measure: Measure
        data: dict[str, Any] | None

    def check(self, key: str, source: Source | None) -> None:
        at, known = ("data", source) if self.config.data is None else (f"{key}.data", make_source(self.config.data, f"{key}.data"))
        if known is None:
            raise ConfigError(at, "is null, and there is no run whose data could be compared with", "name a data source")
        if "image" not in known.names:
            fix = f"choose data with pictures, or compare with others, e.g. '{key}.data={{source: emoji, size: 32, captions: null}}'"
            raise ConfigError(at, "has no pictures that samples could be compared with", fix)

    def prepare(self, device: torch.device, source: Source | None) -> None:
        self._source = source if self.config.data is None else make_source(self.config.data)
        self._known: dict[tuple[int, int], tuple[Tensor, list[str]]] = {}

    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        if images.ndim != 4:
            raise ValueError("only pictures can be compared, not videos")
        size = tuple(images.shape[-2:])
        if size not in self._known:
            self._known[size] = pictures_of(self._source, size)
        found = matches(images * 2 - 1, prompts, *self._known[size])
        hits = self.config.measure is Measure.hit
        return torch.tensor([torch.nan if m is None else float(m.hit) if hits else -m.mse for m in found])
