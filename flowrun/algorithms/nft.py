"""DiffusionNFT (arXiv 2509.16117): finished samples are noised again, and the velocity is drawn to good ones and from bad ones.

    r = clip(A / (2 clip) + 1/2, 0, 1),  x = (1 - sigma) clean + sigma noise
    v+ = beta v + (1 - beta) v_old,      v- = (1 + beta) v_old - beta v
    L+- = < (x - sigma v+- - clean)^2 > / w+-,   w+- = max(< |x - sigma v+- - clean| >, 1e-5), without gradient
    loss = clip mean over rows of  (r L+ + (1 - r) L-) / beta   +  kl_weight < (v - v_ref)^2 >

At v = v_old the loss does not depend on r, and its gradient does: d loss / d v = -(2 r - 1) 2 sigma (clean_estimate - clean) / w
for every beta, so that r = 1/2 moves nothing. The old policy samples, and follows the trained one once per epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flowrun.algorithms import Lesson, Online, Paradigm, Policies, Rereads, StepOut
from flowrun.algorithms._online import masked, squared_distance
from flowrun.config import ConfigError
from flowrun.flow.path import clean_estimate, mix, wide
from flowrun.flow.times import Times, candidates, draw_times
from flowrun.optim.decay import Decay
from flowrun.rollout_settings import RolloutSettings

LEAST_WEIGHT = 1e-5


class Nft(Online):
    paradigm = Paradigm.decoupled
    rereads = Rereads.final_latent
    keeps_old = True
    levels_by = "task.least and task.greatest"

    @dataclass(kw_only=True, slots=True)
    class Config:
        beta: float          # how far v+ and v- lie from v_old, in steps of v - v_old
        times: Times         # which noise levels are learned from: discrete | uniform | logit_normal
        levels: int          # of them for each sample and update
        least: float         # the lowest level
        greatest: float      # the highest level
        shift: float         # of uniform and logit_normal; above 1: more noise
        kl_weight: float     # of the distance from rollout.reference; 0: it is not asked
        old: Decay           # how slowly the policy that samples follows the trained one

        def __post_init__(self) -> None:
            if not self.beta > 0:
                raise ConfigError("task.beta", f"is {self.beta}", "give a positive number, e.g. 1")
            if self.levels < 1:
                raise ConfigError("task.levels", f"is {self.levels}", "give at least 1")
            if not 0 < self.least < self.greatest <= 1:
                what = f"are {self.least:g} and {self.greatest:g}"
                raise ConfigError("task.least, task.greatest", what, "noise levels rise from above 0 to at most 1")
            if not self.shift > 0:
                raise ConfigError("task.shift", f"is {self.shift}", "must be positive; 1 leaves the draws as they are")
            if not self.kl_weight >= 0:
                raise ConfigError("task.kl_weight", f"is {self.kl_weight}", "give 0 or more")

    def __init__(self, config: Config, rollout: RolloutSettings) -> None:
        super().__init__(config, rollout)
        if config.times is Times.discrete and config.shift != 1:
            raise ConfigError("task.shift", f"is {config.shift:g}, but times=discrete takes the sampler's own levels", "set it to 1")

    def check(self, schedule: Tensor) -> None:
        c = self.config
        there = len(candidates(schedule, c.least, c.greatest))
        if c.times is Times.discrete and c.levels > there:
            what = f"is {c.levels}, but the sampler has {there} levels between {c.least:g} and {c.greatest:g}"
            raise ConfigError("task.levels", what, "give fewer, more rollout.sampler.steps, or times=uniform")

    def levels(self, schedule: Tensor) -> Tensor:
        c = self.config
        return candidates(schedule, c.least, c.greatest) if c.times is Times.discrete else torch.tensor([c.least, c.greatest])

    @property
    def asks_reference(self) -> bool:
        return self.config.kl_weight > 0

    def terms(self, epoch_steps: Sequence[int]) -> int:
        return self.config.levels

    def old_decay(self, epoch: int) -> float:
        return self.config.old.at(epoch)

    def losses(self, lesson: Lesson, policies: Policies, generator: torch.Generator) -> list[Callable[[], StepOut]]:
        c, w = self.config, lesson.walked
        times = draw_times(c.times, c.levels, c.least, c.greatest, c.shift, w.sigmas.cpu(), generator)  # [T]
        policies.begin(times)
        return [partial(self._loss, lesson, policies, sigma, generator) for sigma in times]

    def _loss(self, lesson: Lesson, policies: Policies, sigma: Tensor, generator: torch.Generator) -> StepOut:
        c, clean = self.config, wide(lesson.walked.clean)                                      # [B, ...]
        sigma, most = sigma.to(clean.device), self.rollout.advantage.clip
        noise = torch.randn(clean.shape, generator=generator).to(clean)
        x = mix(clean, noise, sigma)                                                           # [B, ...]
        reference = policies.reference(x, sigma) if self.asks_reference else None
        old = policies.old(x, sigma)
        v = policies.trained(x, sigma)
        r = (lesson.advantages / (2 * most) + 0.5).clamp(0, 1)                                 # [B]
        toward = _error(x, c.beta * v + (1 - c.beta) * old, sigma, clean)                      # [B]
        away = _error(x, (1 + c.beta) * old - c.beta * v, sigma, clean)
        per_row = most * (r * toward + (1 - r) * away) / c.beta
        metrics = {"old_distance": squared_distance(v.detach(), old).mean(), "sigma": sigma}
        if reference is not None:
            distance = squared_distance(v, reference)
            per_row = per_row + c.kl_weight * distance
            metrics["kl"] = distance.detach().mean()
        per_row = masked(per_row, lesson.valid)
        return StepOut(per_row.mean(), per_row.detach(), metrics)


def _error(x: Tensor, velocity: Tensor, sigma: Tensor, clean: Tensor) -> Tensor:
    """L of one of the pair: [B]."""
    off = clean_estimate(x, velocity, sigma) - clean
    weight = off.detach().abs().flatten(1).mean(1).clamp(min=LEAST_WEIGHT)
    return off.square().flatten(1).mean(1) / weight
