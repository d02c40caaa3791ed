"""How alike left and right are: 1 - mean |x - mirrored x|, from 0 to 1. A picture of one colour is symmetrical."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowrun.data import Row
from flowrun.rewards import Reward


class Symmetry(Reward):
    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        return 1 - (images - images.flip(-1)).abs().flatten(1).mean(1)       # [B]
