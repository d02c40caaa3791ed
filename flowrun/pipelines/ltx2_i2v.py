"""LTX-2 (HaCohen et al. 2026, arXiv 2601.03233), from an image: the first latent frame is given, and its tokens have time 0.

    x_1 = condition for the network;  velocity_1 = (x_1 - condition) / sigma,  which leads straight to the condition

The loss is over the other frames. The image is the video's own first frame, as it is; diffusers' pipeline presses it through
H.264 first unless it is told `image_crf=0`.

Legend: B rows, C channels, f h w latent frames, height and width, F H W frames, height and width in pixels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flowrun.config import ConfigError
from flowrun.flow.path import expand
from flowrun.graph import Unit
from flowrun.pipelines import Shape
from flowrun.pipelines._ltx2 import LTX2, Prepared
from flowrun.pipelines._targets import in_units

CONDITION = "image_condition_latents"


class ImageToVideoWithSound(LTX2):
    conditions = (*LTX2.conditions, CONDITION)
    given = 1

    def image_units(self) -> tuple[Unit, ...]:
        return (Unit(name=CONDITION, input_params=("video",), output_params=(CONDITION,), onload_model_names=("vae",),
                     process=_condition),)  # fmt: skip

    @staticmethod
    def moments(vae: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = LTX2.moments(vae, pixels)  # [B, C, f, h, w]
        return mean, torch.cat([torch.zeros_like(std[:, :, :1]), std[:, :, 1:]], dim=2)

    def latent_shape(self, shape: Shape) -> tuple[int, ...]:
        found = super().latent_shape(shape)
        if found[1] == self.given:
            what = "a video of 1 frame is all given, and nothing is left to learn"
            raise ConfigError("data", what, f"choose 1 + {self.frame_reduction} n frames, such as {1 + self.frame_reduction}")
        return found

    def seen(self, prepared: Prepared, video: Tensor) -> Tensor:
        return torch.cat([prepared[CONDITION].to(video.dtype), video[:, :, 1:]], dim=2)

    def led(self, prepared: Prepared, video: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
        first = video[:, :, :1]
        return torch.cat([(first - prepared[CONDITION]) / expand(sigma, first), velocity[:, :, 1:]], dim=2)

    def told_time(self, time: Tensor, video: Tensor) -> Tensor:
        """time: [B] -> [B, f h w]."""
        times = time[:, None, None].repeat(1, video.shape[2], video[0, 0, 0].numel())
        times[:, 0] = 0
        return times.flatten(1)


def _condition(ctx: Any, video: Tensor) -> dict[str, Tensor]:
    """video: uint8 [F, 3, H, W] -> the latents of its first frame alone, [C, 1, h, w], fp32."""
    vae = ctx.models["vae"]
    return {CONDITION: LTX2.moments(vae, in_units(video[:1], vae)[None])[0][0]}
