"""The VAE of Wan and of Qwen-Image: causal in time, statistics per channel.

    latents = (raw - mean) / std
    f = (F - 1) / t + 1,  the first frame alone and then t at a time

Legend: B rows, C channels, f h w latent frames, height and width, F H W frames, height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowrun.pipelines._targets import posterior


class CausalVae:
    """For pipelines of pictures: a picture is a video of one frame, without its dimension."""

    configs: Mapping[str, Any]
    axes: ClassVar[int] = 2  # of latents behind the channels: h w, and f of videos

    @property
    def channels(self) -> int:
        return self.configs["vae"]["z_dim"]

    @property
    def reduction(self) -> int:
        return 2 ** len(self.configs["vae"]["temperal_downsample"]) * (self.configs["vae"].get("patch_size") or 1)

    @property
    def frame_reduction(self) -> int:
        """t, frames for each latent frame but the first."""
        return 2 ** sum(self.configs["vae"]["temperal_downsample"])

    def statistics(self) -> dict[str, Any]:
        return {name: list(self.configs["vae"][name]) for name in ("latents_mean", "latents_std")}

    def normalise(self, raw: Tensor) -> Tensor:
        mean, std = self._statistics(raw)
        return (raw - mean) / std

    def denormalise(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents)
        return latents * std + mean

    @staticmethod
    def moments(vae: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = posterior(vae, pixels[:, :, None])  # [B, C, 1, h, w]
        return mean[:, :, 0], std[:, :, 0]

    @staticmethod
    def pixels(vae: nn.Module, raw: Tensor) -> Tensor:
        return vae.decode(raw[:, :, None], return_dict=False)[0][:, :, 0]

    def _statistics(self, like: Tensor) -> list[Tensor]:
        """Mean and standard deviation of each channel, [C, 1, 1] or [C, 1, 1, 1]."""
        values = (torch.tensor(found, device=like.device) for found in self.statistics().values())
        return [value.reshape(-1, *(1,) * self.axes) for value in values]


class CausalVideoVae(CausalVae):
    """For pipelines of videos, whose frames come first in pixels and behind the channels in latents."""

    axes = 3

    @staticmethod
    def moments(vae: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        return posterior(vae, pixels.transpose(1, 2))  # [B, C, f, h, w]

    @staticmethod
    def pixels(vae: nn.Module, raw: Tensor) -> Tensor:
        return vae.decode(raw, return_dict=False)[0].transpose(1, 2)  # [B, F, 3, H, W]
