"""Wan 2.2 TI2V, 5B (Wan team 2025), from an image: the first latent frame is given, and its tokens have time 0.

    x_1 = condition for the network;  velocity_1 = (x_1 - condition) / sigma,  which leads straight to the condition

The first frame's target is its condition, without a draw, so that it adds nothing to the loss.

Legend: B rows, C channels, f h w latent frames, height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flowrun.flow.path import expand
from flowrun.graph import Unit
from flowrun.pipelines._diffusers import TIME_UNITS
from flowrun.pipelines._targets import posterior
from flowrun.pipelines._wan import Prepared
from flowrun.pipelines._wan_image import CONDITION, condition_unit
from flowrun.pipelines._wan_tokens import TokenTimes


class Wan22SmallImageToVideo(TokenTimes):
    conditions = ("prompt_embeds", CONDITION)

    def units(self) -> tuple[Unit, ...]:
        text, *target = super().units()
        return text, condition_unit(self.normalise, self.statistics(), grey=False), *target

    @staticmethod
    def moments(vae: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = posterior(vae, pixels.transpose(1, 2))  # [B, C, f, h, w]
        return mean, torch.cat([torch.zeros_like(std[:, :, :1]), std[:, :, 1:]], dim=2)

    def seen(self, prepared: Prepared, x: Tensor) -> Tensor:
        return torch.cat([prepared[CONDITION].to(x.dtype), x[:, :, 1:]], dim=2)

    def times(self, time: Tensor, x: Tensor) -> Tensor:
        times = super().times(time, x)
        times[:, 0] = 0
        return times

    def predicted(self, network: nn.Module, prepared: Prepared, x: Tensor, time: Tensor) -> Tensor:
        out, first = super().predicted(network, prepared, x, time), x[:, :, :1]
        given = (first - prepared[CONDITION]) / expand(time / TIME_UNITS, first)  # [B, C, 1, h, w]
        return torch.cat([given, out[:, :, 1:]], dim=2)
