"""A model of a few milliseconds a step, so that what surrounds it shows: the emoji pipeline around four dense layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flowrun.pipelines import Component
from flowrun.pipelines.emoji import EmojiPipeline

CHANNELS, POOLED, WIDTH = 192, 384, 128


class Dense(nn.Module):
    """Each token for itself: x [B, C, h, w], pooled [B, 384], sigma [B] -> [B, C, h, w]."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.text = nn.Linear(CHANNELS, WIDTH), nn.Linear(POOLED + 1, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: Tensor, pooled: Tensor, sigma: Tensor) -> Tensor:
        text = self.text(torch.cat((pooled, sigma[:, None]), dim=1))  # [B, WIDTH]
        hidden = self.enter(x.flatten(2).transpose(1, 2)) + text[:, None]  # [B, h w, WIDTH]
        hidden = self.second(self.first(hidden).relu()).relu()
        return self.leave(hidden).transpose(1, 2).reshape(x.shape)


def velocity(network: nn.Module, batch: Mapping[str, Tensor], x: Tensor, sigma: Tensor) -> Tensor:
    return network(x, batch["pooled_prompt_embeds"], sigma)


class Small(EmojiPipeline):
    def components(self) -> dict[str, Component]:
        network = Component(
            name="transformer",
            load=Dense,
            outline=Dense,
            configure=dict,
            identity=lambda hash_file: b"small",
            describe="four dense layers",
        )
        return {**super().components(), "transformer": network}

    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> Mapping[str, Tensor]:
        return batch

    def velocity(self, prepared: Mapping[str, Tensor], x: Tensor, sigma: Tensor) -> Tensor:
        return velocity(self.models["transformer"], prepared, x, sigma)
