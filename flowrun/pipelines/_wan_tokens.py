"""Wan 2.2 5B: the network is told the time of each token, so that a given first frame can have time 0.

Legend: B rows, C channels, f h w latent frames, height and width.
"""

from __future__ import annotations

from torch import Tensor

from flowrun.pipelines._wan import Wan


class TokenTimes(Wan):
    token_times = True

    def told_time(self, time: Tensor, x: Tensor) -> Tensor:
        """time: [B] -> [B, f h w / 4]."""
        return self.times(time, x).flatten(1)

    def times(self, time: Tensor, x: Tensor) -> Tensor:
        """Of each token: [B, f, h / 2, w / 2]."""
        frames, height, width = x.shape[2:]
        return time[:, None, None, None].repeat(1, frames, height // self.patch, width // self.patch)
