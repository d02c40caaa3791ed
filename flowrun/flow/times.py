"""Noise levels at which finished samples are noised again to be learned from: a few, shared by all rows of a batch.

Levels between `least` and `greatest`; the rest of the axis, near the clean end above all, is not learned from. Continuous
draws are stratified: the range of probabilities is cut into as many equal parts as levels are drawn, and one comes of each.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from flowrun.flow.schedule import shifted


class Times(Enum):
    """discrete: levels of the sampling schedule. uniform, logit_normal: as training draws them, z ~ N(0, 1)."""

    discrete = "discrete"
    uniform = "uniform"
    logit_normal = "logit_normal"


def candidates(schedule: Tensor, least: float, greatest: float) -> Tensor:
    """Levels of the schedule [T + 1] that are drawn from, falling; not its end, where there is nothing to learn."""
    levels = schedule[:-1]
    return levels[(levels >= least) & (levels <= greatest)]


def draw_times(kind: Times, count: int, least: float, greatest: float, shift: float, schedule: Tensor,
               generator: torch.Generator) -> Tensor:  # fmt: skip
    """`count` levels in a random order: [count], fp32, on the CPU. shift: of continuous draws, above 1 toward noise.

    Raises ValueError when the schedule has fewer levels in the range: discrete ones are all different."""
    if kind is Times.discrete:
        levels = candidates(schedule, least, greatest)
        if count > len(levels):
            raise ValueError(f"{count} levels of {len(levels)} between {least:g} and {greatest:g}")
        return levels[torch.randperm(len(levels), generator=generator)[:count]].float().cpu()
    parts = torch.arange(count, dtype=torch.float64)
    share = (parts + 1 - torch.rand(count, generator=generator, dtype=torch.float64)) / count  # in (0, 1]
    ends = shifted(torch.tensor([least, greatest], dtype=torch.float64), 1 / shift)
    if kind is Times.logit_normal:
        values = torch.special.ndtr(ends.logit())
        drawn = torch.sigmoid(torch.special.ndtri(torch.lerp(values[0], values[1], share)))
    else:
        drawn = torch.lerp(ends[0], ends[1], share)
    return shifted(drawn, shift).clamp(least, greatest)[torch.randperm(count, generator=generator)].float()
