"""Supervised fine-tuning by flow matching (Lipman et al. 2022, arXiv 2210.02747; densities of arXiv 2403.03206).

    sigma ~ density,  noise ~ N(0, I),  x = (1 - sigma) clean + sigma noise
    loss = mean over rows of  weight(sigma) < (velocity(x, sigma) - (noise - clean))^2 >
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrun.algorithms import Algorithm, Paradigm, StepOut
from flowrun.config import ConfigError
from flowrun.flow.density import Density, Weighting, draw, weight
from flowrun.flow.path import mix, velocity_target, wide
from flowrun.graph import seed_of

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline

SEED_BITS = 63  # seed_of is uniform over [0, 2^63)


class Sft(Algorithm):
    paradigm = Paradigm.decoupled

    @dataclass(kw_only=True, slots=True)
    class Config:
        density: Density            # which noise levels are trained: uniform | logit_normal
        density_mean: float         # of logit_normal's z; uniform has none
        density_std: float          # of logit_normal's z; uniform has none
        shift: float                # > 1 moves the draws toward noise, 1 leaves them
        weighting: Weighting        # of a row's error by its sigma: none | sigma_sqrt | cosmap
        caption_dropout: float      # share of visits that train on the empty caption, which guidance subtracts

        def __post_init__(self) -> None:
            if self.density_std <= 0:
                raise ConfigError("task.density_std", f"is {self.density_std}", "a standard deviation is positive")
            if self.shift <= 0:
                raise ConfigError("task.shift", f"is {self.shift}", "must be positive; 1 leaves the draws as they are")
            if not 0 <= self.caption_dropout <= 1:
                raise ConfigError("task.caption_dropout", f"is {self.caption_dropout}", "a share lies in [0, 1]")
            if self.weighting is Weighting.sigma_sqrt and self.density is Density.uniform:
                raise ConfigError("task.weighting", "sigma_sqrt has no finite mean under density=uniform",
                                  "use task.density=logit_normal or another weighting")

    def loss(self, pipeline: Pipeline, batch: Mapping[str, Tensor], generator: torch.Generator) -> StepOut:
        c = self.config
        clean = wide(batch[pipeline.target])                                                          # [B, ...]
        sigma = draw(c.density, c.density_mean, c.density_std, c.shift, len(clean), generator).to(clean.device)   # [B]
        noise = torch.randn(clean.shape, generator=generator, device=generator.device, dtype=torch.float32).to(clean)
        x = mix(clean, noise, sigma)                                                                  # [B, ...]
        velocity = pipeline.velocity(pipeline.begin(batch, sigma, noise), x, sigma)                   # [B, ...]
        squares = (wide(velocity) - velocity_target(clean, noise)).square()                           # [B, ...]
        error = squares.mean(tuple(range(1, squares.ndim)))                                           # [B]
        per_row = error if c.weighting is Weighting.none else weight(c.weighting, sigma) * error      # [B]
        return StepOut(per_row.mean(), per_row.detach(), {"mse": error.detach().mean(), "sigma": sigma.mean()})

    def variants(self) -> list[dict[str, Any]]:
        return [{}, {"prompt": ""}] if self.config.caption_dropout > 0 else [{}]

    def choose(self, seed: int, row_id: str, epoch: int) -> int:
        """1 (the empty caption) with probability `caption_dropout`, exact to 2^-63."""
        threshold = int(self.config.caption_dropout * 2**SEED_BITS)
        return int(seed_of(seed, "caption_dropout", row_id, epoch) < threshold)
