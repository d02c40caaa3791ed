"""How few or how many bytes a picture takes as a JPEG file, in kilobytes (Black et al. 2023, arXiv 2305.13301, section 5.1).

Negative where small files are wanted, so that more is better in both cases.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from flowrun.config import ConfigError
from flowrun.data import Row, Source
from flowrun.rewards import Reward
from flowrun.rewards._frames import per_frame, to_pil


class Wanted(Enum):
    small = "small"
    large = "large"


class JpegSize(Reward):
    @dataclass(kw_only=True, slots=True)
    class Config:
        wanted: Wanted
        quality: int

    def check(self, key: str, source: Source | None) -> None:
        if not 1 <= self.config.quality <= 95:
            raise ConfigError(f"{key}.quality", f"is {self.config.quality}", "give 1 to 95")

    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        kilobytes = per_frame(self._kilobytes, images, prompts)
        return -kilobytes if self.config.wanted is Wanted.small else kilobytes

    def _kilobytes(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        sizes = []
        for picture in to_pil(images):
            file = io.BytesIO()
            picture.save(file, format="JPEG", quality=self.config.quality)
            sizes.append(file.tell() / 1000)
        return torch.tensor(sizes, dtype=torch.float32)                      # [N]
