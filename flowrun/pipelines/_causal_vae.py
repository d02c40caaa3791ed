"""The VAE of Wan and of Qwen-Image: causal in time, statistics per channel.

    latents = (raw - mean) / std

Legend: B rows, C channels, h w latent height and width, H W picture height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.pipelines._targets import posterior


class CausalVae:
    """For pipelines of pictures: a picture is a video of one frame."""

    configs: Mapping[str, Any]

    @property
    def channels(self) -> int:
        return self.configs["vae"]["z_dim"]

    @property
    def reduction(self) -> int:
        return 2 ** len(self.configs["vae"]["temperal_downsample"])

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
        """Mean and standard deviation of each channel, [C, 1, 1]."""
        return [torch.tensor(values, device=like.device)[:, None, None] for values in self.statistics().values()]
