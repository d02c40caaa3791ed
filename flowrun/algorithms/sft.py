"""Supervised fine-tuning by flow matching (Lipman et al. 2022, arXiv 2210.02747; densities of arXiv 2403.03206).

    sigma ~ density, within the range of what is trained,  noise ~ N(0, I),  x = (1 - sigma) clean + sigma noise
    loss = mean over rows of  weight(sigma) < (velocity(x, sigma) - (noise - clean))^2 >

A model of several streams says how much the latents of each count (`weigh`), 1 elsewhere.
A model that is no flow by birth has the loss that it was trained by: `level` makes its noise levels of the draws and
`error_weight` a factor of the squared error (both in flowrun/pipelines).

With a mask m in [0, 1] the mean < e > over a row's latents becomes  sum m e / sum m.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from flowrun.algorithms import Paradigm, StepOut, Supervised
from flowrun.config import ConfigError
from flowrun.flow.density import Density, Weighting, draw, weight
from flowrun.flow.path import mix, velocity_target, wide
from flowrun.graph import Unit, seed_of

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline

MASK = "loss_mask"  # what a picture's mask is beside its latents
SEED_BITS = 63  # seed_of is uniform over [0, 2^63)


class Sft(Supervised):
    paradigm = Paradigm.decoupled

    @dataclass(kw_only=True, slots=True)
    class Config:
        density: Density            # which noise levels are trained: uniform | logit_normal
        density_mean: float         # of logit_normal's z; uniform has none
        density_std: float          # of logit_normal's z; uniform has none
        shift: float                # > 1 moves the draws toward noise, 1 leaves them
        weighting: Weighting        # of a row's error by its sigma: none | sigma_sqrt | cosmap
        caption_dropout: float      # share of visits that train on the empty caption, which guidance subtracts
        mask: bool                  # whether the data's `mask` says which parts of a picture count

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
        ends = pipeline.trained_range
        share = draw(c.density, c.density_mean, c.density_std, c.shift, len(clean), generator, *ends).to(clean.device)  # [B]
        sigma = pipeline.level(share)                                                                 # [B]
        noise = torch.randn(clean.shape, generator=generator, device=generator.device, dtype=torch.float32).to(clean)
        x = mix(clean, noise, sigma)                                                                  # [B, ...]
        velocity = pipeline.velocity(pipeline.begin(batch, sigma, noise), x, sigma)                   # [B, ...]
        squares = (wide(velocity) - velocity_target(clean, noise)).square()                           # [B, ...]
        each, squares = pipeline.stream_errors(squares.detach()), pipeline.weigh(squares)
        error = _mean(squares, batch[MASK]) if c.mask else squares.mean(tuple(range(1, squares.ndim)))    # [B]
        if (own := pipeline.error_weight(sigma)) is not None:
            error = own * error                                                                       # [B]
        per_row = error if c.weighting is Weighting.none else weight(c.weighting, sigma) * error      # [B]
        return StepOut(per_row.mean(), per_row.detach(), {"mse": error.detach().mean(), "sigma": sigma.mean(), **each})

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        return (*super().reads(pipeline), *([MASK] if self.config.mask else []))

    def networks(self, pipeline: Pipeline) -> tuple[str, ...]:
        return pipeline.called(*pipeline.trained_range)

    def units(self, pipeline: Pipeline) -> tuple[Unit, ...]:
        if not self.config.mask:
            return ()
        side = pipeline.reduction
        return (Unit(name=MASK, input_params=("mask",), output_params=(MASK,), process=partial(_reduced, side),
                     settings={"side": side}),)  # fmt: skip

    def variants(self) -> list[dict[str, Any]]:
        return [{}, {"prompt": ""}] if self.config.caption_dropout > 0 else [{}]

    def choose(self, seed: int, row_id: str, epoch: int) -> int:
        """1 (the empty caption) with probability `caption_dropout`, exact to 2^-63."""
        threshold = int(self.config.caption_dropout * 2**SEED_BITS)
        return int(seed_of(seed, "caption_dropout", row_id, epoch) < threshold)


def _reduced(side: int, ctx: Any, mask: Tensor) -> dict[str, Tensor]:
    """mask: uint8 [3, H, W], white counts -> the share of each latent's pixels that counts, [1, h, w] in [0, 1]."""
    return {MASK: avg_pool2d(mask.float().mean(0, keepdim=True) / 255, side)}


def _mean(squares: Tensor, mask: Tensor) -> Tensor:
    """squares: [B, C, h, w], mask: [B, 1, h, w] -> [B]; 0 where nothing counts."""
    weight = mask.expand_as(squares)
    return (weight * squares).flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1e-6)
