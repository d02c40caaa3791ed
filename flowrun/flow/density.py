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


def draw(density: Density, mean: float, std: float, shift: float, rows: int, generator: torch.Generator) -> Tensor:
    """Noise levels to train at. [rows], fp32, in (0, 1], on the generator's device. mean, std: of logit_normal's z."""
    if density is Density.uniform:
        # rand is in [0, 1): taken from the other end, so that sigma = 0, where nothing can be learned, never comes.
        sigma = 1 - torch.rand(rows, generator=generator, device=generator.device, dtype=torch.float32)
    else:
        z = torch.randn(rows, generator=generator, device=generator.device, dtype=torch.float32)
        sigma = torch.sigmoid(mean + std * z)
    return shifted(sigma, shift)


def weight(weighting: Weighting, sigma: Tensor) -> Tensor:
    """The weighting's factor at each sigma. Same shape, fp32 or wider."""
    s = wide(sigma)
    if weighting is Weighting.sigma_sqrt:
        return s**-2
    if weighting is Weighting.cosmap:
        return 2 / (math.pi * (1 - 2 * s + 2 * s**2))
    return torch.ones_like(s)
