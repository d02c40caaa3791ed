"""A sampling step as a Gaussian policy: from x at sigma to x_next ~ N(mean, std^2 I) at sigma_next, the next smaller level.

With clean and noise as estimated from the velocity, dt = sigma_next - sigma, and g the diffusion coefficient:

    mean = (1 - sigma_next) clean + (sigma_next + g^2 dt / (2 sigma)) noise,     std = g sqrt(-dt)
      flow_sde    g = eta sqrt(sigma / (1 - sigma))     Flow-GRPO, arXiv 2505.05470
      dance_sde   g = eta                               DanceGRPO, arXiv 2505.07818
    mean = (1 - sigma_next) clean + sqrt(sigma_next^2 - std^2) noise,            std = sigma_next sin(eta pi / 2)
      cps                                               coefficients-preserving sampling, arXiv 2509.05952
    ode: std = 0, Euler's step

At eta = 0 all of them are Euler's step. flow_sde's g has no value at sigma = 1: there 1 - sigma is taken at the level that
follows, so that the first step's std is eta whatever the schedule. cps keeps the path's coefficients exactly and the path's
variance not: it narrows what is sampled, the more the larger eta is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

from flowrun.flow.path import clean_estimate, noise_estimate, wide
from flowrun.flow.step import euler

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Dynamics(Enum):
    """How a step is taken where noise is injected; `ode` injects none."""

    flow_sde = "flow_sde"
    dance_sde = "dance_sde"
    cps = "cps"
    ode = "ode"


class LogProb(Enum):
    """normalized: the Gaussian's own logarithm. unnormalized: - < (x_next - mean)^2 >, which CPS's authors use: steps with a
    larger std then count more, by 2 std^2."""

    normalized = "normalized"
    unnormalized = "unnormalized"


@dataclass(frozen=True)
class Transition:
    """N(mean, std^2 I). mean: [B, ...], fp32 or wider. std: 0-d, on the levels' device or the CPU."""

    mean: Tensor
    std: Tensor


def transition(dynamics: Dynamics, eta: float, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor,
               second: Tensor) -> Transition:  # fmt: skip
    """The step's distribution. x, velocity: [B, ...]; sigma, sigma_next: 0-d, sigma_next < sigma; second: the schedule's second
    level, which stands for sigma in flow_sde's 1 - sigma where sigma is 1. fp32 or wider. Gradients flow through mean."""
    s = wide(sigma)
    if dynamics is Dynamics.ode or eta == 0:
        return Transition(euler(x, velocity, s.to(x.device), wide(sigma_next).to(x.device)), torch.zeros_like(s))
    of_clean, of_noise, std = _coefficients(dynamics, eta, float(sigma), float(sigma_next), float(second), s.dtype)
    return Transition(of_clean * clean_estimate(x, velocity, s) + of_noise * noise_estimate(x, velocity, s), std)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # whoever asks first, training may ask next
def _coefficients(dynamics: Dynamics, eta: float, sigma: float, sigma_next: float, second: float,
                  dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of clean and of noise in the mean, and std: 0-d each, on the CPU, whence any device takes them without waiting."""
    s, n, after = torch.tensor([sigma, sigma_next, second], dtype=dtype, device="cpu")
    if dynamics is Dynamics.cps:
        std = n * math.sin(eta * math.pi / 2)
        return 1 - n, (n.square() - std.square()).sqrt(), std
    g2 = _diffusion_squared(dynamics, eta, s, after)
    return 1 - n, n + g2 * (n - s) / (2 * s), (g2 * (s - n)).sqrt()


def mean_by_velocity(dynamics: Dynamics, eta: float, sigma: Tensor, sigma_next: Tensor, second: Tensor) -> Tensor:
    """d mean / d velocity, 0-d: < (mean - mean')^2 > = its square times < (v - v')^2 >."""
    one = torch.ones(1, dtype=wide(sigma).dtype)
    moved, still = (transition(dynamics, eta, 0 * one, v, sigma.cpu(), sigma_next.cpu(), second.cpu()).mean for v in (one, 0 * one))
    return (moved - still)[0]


def log_prob(x_next: Tensor, step: Transition, kind: LogProb = LogProb.normalized) -> Tensor:
    """log N(x_next; mean, std^2 I), the mean over a row's elements and not their sum. [B], fp32 or wider.

    Raises ValueError for a step without noise, which has none."""
    if not float(step.std) > 0:
        raise ValueError("a step that injects no noise has no log-probability")
    squares = (wide(x_next) - step.mean).square().flatten(1).mean(1)                     # [B]
    if kind is LogProb.unnormalized:
        return -squares
    return -squares / (2 * step.std.square()) - step.std.log() - HALF_LOG_2PI


def nats(kind: LogProb, std: Tensor, elements: int) -> float:
    """Of a row's whole likelihood, in one unit of its `log_prob`: D, or D / (2 std^2) of the unnormalised form. std: the step's, 0-d."""
    return elements if kind is LogProb.normalized else elements / (2 * float(std) ** 2)


def std_of(dynamics: Dynamics, eta: float, sigma: Tensor, sigma_next: Tensor, second: Tensor) -> Tensor:
    """A step's std, which no velocity changes. 0-d, on the CPU."""
    nothing = torch.zeros(1, dtype=wide(sigma).dtype)
    return transition(dynamics, eta, nothing, nothing, sigma.cpu(), sigma_next.cpu(), second.cpu()).std


def _diffusion_squared(dynamics: Dynamics, eta: float, sigma: Tensor, second: Tensor) -> Tensor:
    if dynamics is Dynamics.dance_sde:
        return torch.full_like(sigma, eta**2)
    return eta**2 * sigma / (1 - torch.where(sigma >= 1, second, sigma))
