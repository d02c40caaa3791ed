"""Steps along the flow, from one noise level to the next smaller one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from flowrun.flow.path import expand, wide


def euler(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x + (sigma_next - sigma) velocity. x, velocity: [B, ...]; sigma, sigma_next: [B] or 0-d. fp32 or wider.

    Exact for a velocity that does not change along the way."""
    return wide(x) + (expand(sigma_next, x) - expand(sigma, x)) * wide(velocity)     # [B, ...]


def solve(velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor) -> Tensor:
    """Walk the T + 1 levels `sigmas` downward by Euler steps, from x [B, ...] at the first. Returns [B, ...].

    velocity: (x [B, ...], sigma 0-d) -> [B, ...], called T times. Gradients flow through every call."""
    for sigma, sigma_next in pairwise(sigmas):
        x = euler(x, velocity(x, sigma), sigma, sigma_next)
    return x
