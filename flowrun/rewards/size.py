"""How much of the picture is drawn on: the share of pixels that are not the ground, from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrun.config import ConfigError
from flowrun.data import Row, Source
from flowrun.rewards import Reward


class Size(Reward):
    @dataclass(kw_only=True, slots=True)
    class Config:
        ground: list[int]
        tolerance: int

    def check(self, key: str, source: Source | None) -> None:
        if len(self.config.ground) != 3 or not all(0 <= value <= 255 for value in self.config.ground):
            raise ConfigError(f"{key}.ground", f"is {self.config.ground}", "give red, green and blue, 0 to 255 each")
        if not 0 <= self.config.tolerance < 255:
            raise ConfigError(f"{key}.tolerance", f"is {self.config.tolerance}", "give 0 to 254")

    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        ground = torch.tensor(self.config.ground)[:, None, None] / 255                   # [3, 1, 1]
        distance = (images - ground).abs().amax(-3)                                      # [B, (F,) H, W]
        return (distance > self.config.tolerance / 255).float().flatten(1).mean(1)       # [B]
