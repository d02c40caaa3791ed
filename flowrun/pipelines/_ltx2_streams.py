"""A video's latents and its sound's as one tensor, which paths, losses and solvers take as any other.

    joined   [B, C + E, f, h, w],   E = ceil(a D / (f h w)):  the video's C channels, then the a D values of the sound in
             order, on channels of their own, and zeros where these are not full

Legend: B rows, C channels, f h w latent frames, height and width, a latents of the sound, D values of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parts:
    """video: [B, C, f, h, w]. sound: [B, a, D]. rest: [B, E f h w - a D], which stands for nothing."""

    video: Tensor
    sound: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Streams:
    """channels: C. sound: (a, D). places: (f, h, w)."""

    channels: int
    sound: tuple[int, int]
    places: tuple[int, int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """(C + E, f, h, w)."""
        return self.channels + ceil(prod(self.sound) / prod(self.places)), *self.places

    def parts(self, joined: Tensor) -> Parts:
        video, further = joined[:, : self.channels], joined[:, self.channels :].flatten(1)
        return Parts(video, further[:, : prod(self.sound)].unflatten(1, self.sound), further[:, prod(self.sound) :])

    def join(self, video: Tensor, sound: Tensor, rest: Tensor | None = None) -> Tensor:
        """rest: None for zeros."""
        rows, (channels, *places) = len(video), self.shape
        lacking = (channels - self.channels) * prod(places) - prod(self.sound)
        further = torch.cat([sound.flatten(1), sound.new_zeros(rows, lacking) if rest is None else rest], dim=1)
        return torch.cat([video, further.view(rows, -1, *places)], dim=1)
