"""Which of a walk's steps inject noise, and are trained: all that can, or a few that differ from epoch to epoch.

Few steps make a step's noise, and so its advantage, its own (MixGRPO, arXiv 2507.21802; Flow-GRPO-Fast); the rest is Euler's.
The last step never injects any: its noise would stay in the picture.
"""

from __future__ import annotations

import random
from enum import Enum


class Window(Enum):
    """all: every step that can. random: `size` of them, any. contiguous: `size` neighbours, anywhere. moving: `size`
    neighbours, from the noisiest on, one step further every `stay` epochs, and from the start again after the end."""

    all = "all"
    random = "random"
    contiguous = "contiguous"
    moving = "moving"


def noisy_steps(kind: Window, size: int, stay: int, candidates: range, draws: random.Random, epoch: int) -> tuple[int, ...]:
    """Rising numbers of steps out of `candidates`. draws: keyed by the epoch. Raises ValueError when `size` are not there."""
    if kind is Window.all:
        return tuple(candidates)
    if not 1 <= size <= len(candidates):
        raise ValueError(f"{size} steps of {len(candidates)}")
    if kind is Window.random:
        return tuple(sorted(draws.sample(candidates, size)))
    places = len(candidates) - size + 1
    first = draws.randrange(places) if kind is Window.contiguous else epoch // stay % places
    return tuple(candidates[first : first + size])
