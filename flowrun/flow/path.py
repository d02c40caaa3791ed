"""The straight path of rectified flow (Liu et al. 2022, arXiv 2209.03003; Lipman et al. 2022, arXiv 2210.02747).

    x = (1 - sigma) clean + sigma noise          dx/dsigma = velocity = noise - clean
    clean = x - sigma velocity                   noise = x + (1 - sigma) velocity

Every function takes latents of one shape [B, ...] and sigma of shape [B] (or 0-d: the same for every row).
"""

from __future__ import annotations

import torch
from torch import Tensor


def mix(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x at noise level sigma: (1 - sigma) clean + sigma noise. [B, ...], fp32 or wider."""
    s = expand(sigma, clean)                                     # [B, 1, ...]
    return (1 - s) * wide(clean) + s * wide(noise)               # [B, ...]


def velocity_target(clean: Tensor, noise: Tensor) -> Tensor:
    """What the network is to predict at every point of the path: noise - clean. [B, ...], fp32 or wider."""
    return wide(noise) - wide(clean)


def clean_estimate(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Where the straight line through x ends at sigma = 0: x - sigma velocity. [B, ...], fp32 or wider."""
    return wide(x) - expand(sigma, x) * wide(velocity)


def noise_estimate(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Where the straight line through x ends at sigma = 1: x + (1 - sigma) velocity. [B, ...], fp32 or wider."""
    return wide(x) + (1 - expand(sigma, x)) * wide(velocity)


def expand(per_row: Tensor, like: Tensor) -> Tensor:
    """[B] or 0-d -> [B, 1, ...] or [1, 1, ...] with as many dimensions as `like`, fp32 or wider, on its device.

    Raises ValueError when `per_row` is neither: a [B, 1] or a [1] would broadcast to something else than was meant."""
    if per_row.ndim == 0:
        per_row = per_row[None]
    elif per_row.shape != like.shape[:1]:
        raise ValueError(f"one number per row is wanted: shape {list(per_row.shape)} for {like.shape[0]} rows")
    return wide(per_row).to(like.device).reshape(-1, *(1,) * (like.ndim - 1))


def wide(tensor: Tensor) -> Tensor:
    """The tensor in fp32, or as it is when its type is wider already (float64 in tests)."""
    return tensor if tensor.dtype is torch.float32 else tensor.to(torch.promote_types(tensor.dtype, torch.float32))
