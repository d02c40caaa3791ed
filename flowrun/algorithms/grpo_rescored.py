"""GRPO from rollouts that do not compute what training computes, such as those of a feature cache.

Three policies instead of two (decoupled PPO, Hilton et al. 2021, arXiv 2110.00641): mu drew the step, by whatever the
rollout computed; p_old is the same weights' by the path of training, computed anew before the epoch's first update; p is trained.

    rho = exp(log p(x_next | x) - log p_old(x_next | x))
    w = min((p_old(x_next | x) / mu(x_next | x))^power, truncate)
    loss = mean over rows of  w max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))  +  kl_weight KL

rho is exactly 1 before the first update, and what the clip leaves it is not used up by the rollout's error. For a mean under p_old of
draws of mu, w has to be the ratio of whole likelihoods, D times what a mean over the D elements says: with power = 1 and truncate =
null the gradient is that of an exact rollout from the same states. The more elements, the further such ratios lie apart, and the fewer
steps count: power trades that for bias, and rho's own measure would be power = 1 / D. The states themselves stay those that mu came
to, as do advantages; KL is of both policies at a state and is not weighed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrun.algorithms._clipped import Clipped
from flowrun.config import ConfigError
from flowrun.flow.importance import Weighting
from flowrun.rollout import Walked


class GrpoRescored(Clipped):
    rescores = True

    @dataclass(kw_only=True, slots=True)
    class Config(Clipped.Config):
        truncate: float | None  # the greatest weight of a step; null: any
        power: float            # of the ratio of likelihoods that is the weight

        def __post_init__(self) -> None:
            Clipped.Config.__post_init__(self)
            if self.truncate is not None and not self.truncate > 0:
                raise ConfigError("task.truncate", f"is {self.truncate}", "give a positive number, e.g. 2, or null for no bound")
            if not 0 < self.power <= 1:
                raise ConfigError("task.power", f"is {self.power}", "give at most 1, which is the ratio itself, and more than 0")

    @property
    def weighting(self) -> Weighting:
        return Weighting(self.config.power, self.config.truncate)

    def weigh(self, per_row: Tensor, walked: Walked, step: int) -> Tensor:
        return self.weighting.logs(walked.off[step]).exp().to(per_row.dtype) * per_row
