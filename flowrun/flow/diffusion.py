"""Models of the variance-preserving diffusion (Ho et al. 2020, arXiv 2006.11239) on the straight path.

    z = a clean + b noise,  a = sqrt(alphas_cumprod), b = sqrt(1 - alphas_cumprod)      what the network takes
    x = z / (a + b) = (1 - sigma) clean + sigma noise,   sigma = b / (a + b)            the straight path's point

so with D = sqrt((1 - sigma)^2 + sigma^2):  a = (1 - sigma) / D,  b = sigma / D,  z = x / D. DDIM's steps (Song et al. 2020,
arXiv 2010.02502) in z are Euler's steps in x, since both move along the line through the estimates of clean and noise.

Legend: B rows, N training times.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flowrun.flow.path import expand, wide


class Times:
    """Noise levels of the training times 0 ... N - 1, rising. alphas_cumprod: [N]."""

    def __init__(self, alphas_cumprod: Tensor) -> None:
        alphas = alphas_cumprod.double()
        a, b = alphas.sqrt(), (1 - alphas).sqrt()
        self.ratios = b / a                             # [N], float64
        self.sigmas = (b / (a + b)).float()             # [N]

    def level(self, share: Tensor) -> Tensor:
        """Shares of time in (0, 1], equally likely ones for equally likely training times -> sigma. [B], fp32."""
        times = (share * len(self.sigmas)).ceil().long().clamp(1, len(self.sigmas)) - 1
        return self.sigmas.to(share.device)[times]

    def time(self, sigma: Tensor) -> Tensor:
        """The time of each sigma, between training times by the line through their b / a, as samplers have it. [B], fp32."""
        s = sigma.detach().cpu().double().numpy()
        ratio = s / np.maximum(1 - s, 1e-12)            # b / a
        times = np.interp(ratio, self.ratios.numpy(), np.arange(len(self.ratios)))
        return torch.from_numpy(times).float().to(sigma.device)


def scale(sigma: Tensor, like: Tensor) -> Tensor:
    """D of each row, with as many dimensions as `like`, [B, 1, ...]."""
    s = expand(sigma, like)
    return ((1 - s).square() + s.square()).sqrt()


def velocity_of_epsilon(x: Tensor, epsilon: Tensor, sigma: Tensor) -> Tensor:
    """noise - clean, where the network predicts the noise: (epsilon - x) / (1 - sigma). [B, ...]; sigma [B] below 1."""
    return (wide(epsilon) - wide(x)) / (1 - expand(sigma, x))


def velocity_of_v(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """noise - clean, where the network predicts v = a noise - b clean (Salimans & Ho 2022, arXiv 2202.00512). [B, ...]

    noise = a v + b z and clean = a z - b v, so noise - clean = ((a + b) v + (b - a) z) with z = x / D."""
    s, d = expand(sigma, x), scale(sigma, x)
    return wide(v) / d + (2 * s - 1) * wide(x) / d.square()
