"""Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598)."""

from __future__ import annotations

from torch import Tensor


def guide(negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
    """v = v_neg + g (v_pos - v_neg): g = 0 is the negative prompt alone, 1 the prompt alone. Shapes equal."""
    return negative + guidance * (positive - negative)
