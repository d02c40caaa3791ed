"""How much of one colour there is: the mean of c - (a + b) / 2 over pixels, c the colour's channel and a, b the other two.

From -1 to 1; white, grey and black have 0. With pixels in [-1, 1] the same number is mean(c - (a + b) / 2) / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from flowrun.data import Row
from flowrun.rewards import Reward


class Which(Enum):
    red = "red"
    green = "green"
    blue = "blue"


class Colour(Reward):
    @dataclass(kw_only=True, slots=True)
    class Config:
        which: Which

    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        means = images.flatten(-2).mean(-1)                                  # [B, (F,) 3]
        own = means[..., list(Which).index(self.config.which)]               # [B, (F,)]
        excess = own - (means.sum(-1) - own) / 2
        return excess.reshape(len(images), -1).mean(1)                       # [B]
