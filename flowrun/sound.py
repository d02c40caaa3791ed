"""Sound beside pictures: what a model hears of a video, and what it makes.

Legend: K channels, 1 of mono and 2 of stereo, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """What a model hears: rate samples a second in so many channels, beside fps frames a second."""

    rate: int
    channels: int
    fps: float


@dataclass(frozen=True, kw_only=True)
class Wave:
    """samples: [K, S], fp32 in [-1, 1], on the CPU, `rate` of them a second."""

    samples: Tensor
    rate: int
