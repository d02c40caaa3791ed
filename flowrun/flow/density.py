"""Which noise levels training draws, and how much each counts (Esser et al. 2024, arXiv 2403.03206, section 3.1).

The shift acts on the draw: for logit-normal it is the same as adding log(shift) to the mean, since
logit(shifted(sigma)) = logit(sigma) + log(shift).
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

from flowrun.flow.path import wide
from flowrun.flow.schedule import shifted


class Density(Enum):
    """uniform: sigma ~ U(0, 1]. logit_normal: sigma = 1 / (1 + exp(-z)), z ~ N(mean, std^2)."""

    uniform = "uniform"
    logit_normal = "logit_normal"


class Weighting(Enum):
    """Factor of a row's mean squared velocity error, as a function of its sigma; named as in diffusers.

    none: 1. sigma_sqrt: sigma^-2. cosmap: 2 / (pi (1 - 2 sigma + 2 sigma^2)).
    """

    none = "none"
    sigma_sqrt = "sigma_sqrt"
    cosmap = "cosmap"


def draw(density: Density, mean: float, std: float, shift: float, rows: int, generator: torch.Generator,
         least: float = 0.0, greatest: float = 1.0) -> Tensor:  # fmt: skip
    """Noise levels to train at. [rows], fp32, in (0, 1], on the generator's device. mean, std: of logit_normal's z.

    least, greatest: the draws are those of the whole density that lie between."""
    if (least, greatest) != (0.0, 1.0):
        return _between(density, mean, std, shift, rows, generator, least, greatest)
    if density is Density.uniform:
        # rand is in [0, 1): taken from the other end, so that sigma = 0, where nothing can be learned, never comes.
        sigma = 1 - torch.rand(rows, generator=generator, device=generator.device, dtype=torch.float32)
    else:
        z = torch.randn(rows, generator=generator, device=generator.device, dtype=torch.float32)
        sigma = torch.sigmoid(mean + std * z)
    return shifted(sigma, shift)


def _between(density: Density, mean: float, std: float, shift: float, rows: int, generator: torch.Generator,
             least: float, greatest: float) -> Tensor:  # fmt: skip
    """By the inverse of the distribution function P, taken between its values at both ends: in float64, rounded once.

    logit_normal: P(sigma) = Phi((logit(sigma) - mean) / std). Where both ends lie above Phi's centre it is computed from
    the other side, whose values do not crowd at 1. Phi(z) = erfc(-z / sqrt(2)) / 2, which is exact far out too."""
    share = 1 - torch.rand(rows, generator=generator, device=generator.device, dtype=torch.float64)  # in (0, 1]
    ends = shifted(torch.tensor([least, greatest], device=generator.device, dtype=torch.float64), 1 / shift).clamp(0, 1)
    if density is Density.uniform:
        sigma = torch.lerp(ends[0], ends[1], share)
    else:
        z = (ends.logit() - mean) / std
        side = -1.0 if z[0] > 0 else 1.0
        values = torch.erfc(-side * z / math.sqrt(2)) / 2
        sigma = torch.sigmoid(mean + std * side * torch.special.ndtri(torch.lerp(values[0], values[1], share)))
    return shifted(sigma, shift).float().clamp(least, greatest)


def weight(weighting: Weighting, sigma: Tensor) -> Tensor:
    """The weighting's factor at each sigma. Same shape, fp32 or wider."""
    s = wide(sigma)
    if weighting is Weighting.sigma_sqrt:
        return s**-2
    if weighting is Weighting.cosmap:
        return 2 / (math.pi * (1 - 2 * s + 2 * s**2))
    return torch.ones_like(s)
