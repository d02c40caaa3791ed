"""Noise levels to sample at, and the shift that moves them (Esser et al. 2024, arXiv 2403.03206, equation 23)."""

from __future__ import annotations

import torch
from torch import Tensor


def shifted(sigma: Tensor, shift: float) -> Tensor:
    """s sigma / (1 + (s - 1) sigma): maps [0, 1] onto itself; s > 1 spends more of it near the noise, 1 is no shift.

    Shifts compose by product, and 1/s undoes s. Any shape; raises ValueError unless s > 0."""
    if not shift > 0:
        raise ValueError(f"a shift is positive, not {shift}")
    return sigma if shift == 1 else shift * sigma / (1 + (shift - 1) * sigma)


def sigmas(steps: int, shift: float) -> Tensor:
    """`steps + 1` noise levels from 1 to 0, both exact, evenly spaced before the shift. [steps + 1], fp32, CPU.

    Made in float64 and rounded once. Raises ValueError unless steps >= 1."""
    if steps < 1:
        raise ValueError(f"sampling needs at least one step, not {steps}")
    return shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).float()
