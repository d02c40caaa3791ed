"""The clipped ratio of group-relative policy optimisation: Flow-GRPO (arXiv 2505.05470), DanceGRPO (arXiv 2505.07818).

Each noisy step of a walk is a Gaussian policy. For a step from x to x_next at which the old policy had log p_old,

    rho = exp(log p(x_next | x) - log p_old)
    loss = mean over rows of  max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))  +  kl_weight KL
    KL = < (mean - mean_ref)^2 >  or  < (velocity - velocity_ref)^2 >

Log-probabilities are means over a latent's D elements, so rho is the D-th root of the likelihood ratio. Before the first update
of an epoch rho is 1. With one update an epoch it is never anything else, and the clip never acts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from flowrun.algorithms import Lesson, Online, Paradigm, Policies, Rereads, StepOut
from flowrun.algorithms._online import masked, squared_distance
from flowrun.config import ConfigError
from flowrun.flow.path import wide
from flowrun.flow.policy import Dynamics
from flowrun.rollout import Walked
from flowrun.rollout_settings import RolloutSettings


class Distance(Enum):
    """Between the trained policy and the reference: of a step's means, or of velocities."""

    mean = "mean"
    velocity = "velocity"


class Clipped(Online):
    """Subclasses say where log p_old comes from, and what a step counts beside its advantage."""

    paradigm = Paradigm.coupled
    rereads = Rereads.log_probs
    levels_by = "rollout.sampler.window.first and last"

    @dataclass(kw_only=True, slots=True)
    class Config:
        clip_low: float      # rho counts down to 1 - clip_low
        clip_high: float     # and up to 1 + clip_high
        kl_weight: float     # of the distance from rollout.reference; 0: it is not asked
        kl: Distance         # what that distance is: mean | velocity

        def __post_init__(self) -> None:
            for name in ("clip_low", "clip_high"):
                if not getattr(self, name) > 0:
                    raise ConfigError(f"task.{name}", f"is {getattr(self, name)}", "give a positive number, e.g. 1e-4")
            if not self.kl_weight >= 0:
                raise ConfigError("task.kl_weight", f"is {self.kl_weight}", "give 0 or more")

    def __init__(self, config: Config, rollout: RolloutSettings) -> None:
        super().__init__(config, rollout)
        if rollout.sampler.dynamics is Dynamics.ode:
            what = "is ode, whose steps have no log-probabilities to compare"
            raise ConfigError("rollout.sampler.dynamics", what, "choose flow_sde, dance_sde or cps")

    def levels(self, schedule: Tensor) -> Tensor:
        return schedule[list(self.rollout.sampler.candidates)]

    @property
    def clip(self) -> float:
        """How far the ratio may move to either side."""
        return min(self.config.clip_low, self.config.clip_high)

    @property
    def asks_reference(self) -> bool:
        return self.config.kl_weight > 0

    def terms(self, epoch_steps: Sequence[int]) -> int:
        return len(epoch_steps)

    def losses(self, lesson: Lesson, policies: Policies, generator: torch.Generator) -> list[Callable[[], StepOut]]:
        policies.begin(lesson.walked.sigmas[:-1])  # as in sampling
        return [partial(self._loss, lesson, policies, step) for step in lesson.walked.steps]

    def _loss(self, lesson: Lesson, policies: Policies, step: int) -> StepOut:
        c, s, w, advantage = self.config, self.rollout.sampler, lesson.walked, lesson.advantages
        x, sigma = wide(w.states[step]), w.sigmas[step]                                        # [B, ...]
        reference = policies.reference(x, sigma) if self.asks_reference else None
        velocity = policies.trained(x, sigma)                                                  # [B, ...]
        taken = w.again(step, velocity, s)
        rho = w.log_ratio(step, taken, s).exp()                                                # [B]
        clipped = rho.clamp(1 - c.clip_low, 1 + c.clip_high)
        per_row = self.weigh(torch.maximum(-advantage * rho, -advantage * clipped), w, step)   # [B]
        metrics = {"ratio": rho.detach().mean(), "ratio_off_max": (rho.detach() - 1).abs().max(),
                   "clip_fraction": _clipped(rho.detach(), clipped.detach(), advantage).mean()}  # fmt: skip
        if reference is not None:
            distance = squared_distance(velocity, reference)                                   # [B]
            if c.kl is Distance.mean:
                distance = squared_distance(taken.mean, w.again(step, reference, s).mean)
            per_row = per_row + c.kl_weight * distance
            metrics["kl"] = distance.detach().mean()
        per_row = masked(per_row, lesson.valid)
        return StepOut(per_row.mean(), per_row.detach(), metrics)

    def weigh(self, per_row: Tensor, walked: Walked, step: int) -> Tensor:
        """What each row of `walked` counts in a step, before its distance from the reference is added: [B] -> [B]."""
        return per_row


def _clipped(rho: Tensor, clipped: Tensor, advantage: Tensor) -> Tensor:
    """1.0 where the clip takes the gradient away: above with a positive advantage, below with a negative one. [B]"""
    return ((rho > clipped) & (advantage > 0) | (rho < clipped) & (advantage < 0)).float()
