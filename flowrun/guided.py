"""The denoisers' velocity for one batch of conditions, with classifier-free guidance: what sampling and training both ask.

Legend: B rows, C (f) h w latent channels, frames, height and width, T noise levels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flowrun.feature_cache import FeatureCache
from flowrun.pipelines import Pipeline


class Guided:
    """(x [B, C, (f,) h, w], sigma 0-d) -> velocity of x's shape, fp32. Calls with equal arguments are equal to the last bit, in
    whatever they are done, as long as the weights are: the same rows lie in the same batch."""

    def __init__(self, pipeline: Pipeline, conditions: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None,
                 noise: Tensor, sigmas: Tensor, guidance: float, cache: FeatureCache) -> None:  # fmt: skip
        """conditions, negative: name -> [B, ...]; negative is used unless guidance is 1, in one call of 2 B rows with the
        conditions, or in one of its own where a feature cache wants that. sigmas: [T], the levels that will be asked for. noise:
        [B, C, (f,) h, w], of the latents' size. cache: of the walk; `FeatureCache()`, none, in training.

        Raises ValueError when guidance lacks negative conditions."""
        guided = guidance != 1
        if guided and negative is None:
            raise ValueError(f"guidance {guidance} needs negative conditions")
        self.pipeline, self.guidance, self.cache = pipeline, guidance, cache
        branches = {"uncond": negative, "cond": conditions} if guided else {"cond": conditions}
        self._twice = guided and not cache.per_branch  # x in one call
        if self._twice:
            branches = {"_".join(branches): pipeline.joined(*branches.values())}  # [2 B, ...]
        sigmas, rows = sigmas.to(noise.device), self._rows(noise)
        self._prepared = {name: pipeline.begin(given, sigmas, rows) for name, given in branches.items()}

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        rows, found = self._rows(x), []  # [B or 2 B, C, (f,) h, w]
        for name, prepared in self._prepared.items():
            with self.cache.branch(name, sigma):
                found.append(self.pipeline.velocity(prepared, rows, sigma.expand(len(rows))))
        v = torch.cat(found)
        if self.guidance == 1:
            return v
        return self.pipeline.guide(*v.chunk(2), self.pipeline.guidance_at(sigma, self.guidance))

    def _rows(self, x: Tensor) -> Tensor:
        return torch.cat([x, x]) if self._twice else x
