"""Squares of latents as tokens.

Legend: B rows, C channels, h w latent height and width, s side of a square.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle


def pack(latents: Tensor, side: int) -> Tensor:
    """[B, C, h, w] -> [B, h w / s^2, s^2 C]: a square of s x s places is one token."""
    return pixel_unshuffle(latents, side).flatten(2).transpose(1, 2)


def unpack(tokens: Tensor, side: int, like: Tensor) -> Tensor:
    """Tokens -> the shape of `like`, [B, C, h, w]."""
    height, width = (length // side for length in like.shape[-2:])
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (height, width)), side)


class Squares:
    """For pipelines whose network takes squares of `patch` x `patch` places as tokens."""

    patch: int

    def pack(self, latents: Tensor) -> Tensor:
        return pack(latents, self.patch)

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        return unpack(packed, self.patch, like)
