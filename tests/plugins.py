"""Plug-ins that tests name as `tests.plugins:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowrun.algorithms import StepOut
from flowrun.algorithms.sft import Sft
from flowrun.graph import Unit
from flowrun.pipelines.emoji import EmojiPipeline

Scope = dict[str, Any]


class Jittered(EmojiPipeline):
    """The emoji pipeline with a unit that draws: it adds noise to the cached target latents, anew each epoch."""

    random = "per_epoch"

    def units(self) -> tuple[Unit, ...]:
        jitter = Unit(
            name="jitter",
            input_params=("target_latents",),
            output_params=("target_latents",),
            process=_jitter,
            random=self.random,
        )
        return (*super().units(), jitter)


class FrozenJitter(Jittered):
    """The same with one draw for ever."""

    random = "frozen"


def _jitter(ctx: Any, target_latents: Tensor) -> dict[str, Tensor]:
    noise = torch.randn(target_latents.shape, generator=ctx.generator)
    return {"target_latents": target_latents + 0.1 * noise}


class Undeclared(EmojiPipeline):
    """The emoji pipeline with a unit at its end that does not say what it reads and writes."""

    def units(self) -> tuple[Unit, ...]:
        return (*super().units(), Unit(name="undeclared", take_over=True, process=_brighten))


class UndeclaredLive(Jittered):
    """The same behind a draw per epoch, which keeps it from being cached."""

    def units(self) -> tuple[Unit, ...]:
        return (*super().units(), Unit(name="undeclared", take_over=True, process=_brighten))


def _brighten(ctx: Any, shared: Scope, posi: Scope, nega: Scope) -> tuple[Scope, Scope, Scope]:
    """Adds a thousandth of the picture's mean to the latents; a prompt alone has neither."""
    if "image" not in shared:
        return shared, posi, nega
    return {**shared, "target_latents": shared["target_latents"] + shared["image"].float().mean() / 1000}, posi, nega


class NoPicture(Sft):
    """Teaches the network to answer noise with noise, whatever the caption: it needs no picture."""

    def reads(self, pipeline: Any) -> tuple[str, ...]:
        return pipeline.conditions

    def loss(self, pipeline: Any, batch: Mapping[str, Tensor], generator: torch.Generator) -> StepOut:
        count = len(batch[pipeline.conditions[0]])
        noise = torch.stack([pipeline.noise((32, 32), generator) for _ in range(count)])  # [B, C, h, w]
        sigma = torch.ones(count)
        error = pipeline.velocity(pipeline.begin(batch, sigma, noise), noise, sigma) - noise
        per_row = error.square().flatten(1).mean(1)
        return StepOut(per_row.mean(), per_row.detach())


class OfVideos(EmojiPipeline):
    """Takes a video as one picture, its frames one below the other: rows of unequal lengths cannot share a batch."""

    inputs = ("video", "prompt")

    def latent_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return super().latent_shape(shape[-2:])

    def units(self) -> tuple[Unit, ...]:
        text, _ = super().units()
        frames = Unit(name="frames", input_params=("video",), output_params=("target_latents",), process=self._frames)
        return text, frames

    def _frames(self, ctx: Any, video: Tensor) -> dict[str, Tensor]:
        """video: uint8 [F, 3, H, W] -> [C, F h, w], fp32."""
        tiles = [self._target_latents(ctx, frame)["target_latents"] for frame in video]
        return {"target_latents": torch.cat(tiles, dim=1)}


class OfEdits(EmojiPipeline):
    """Teaches the difference between a row's picture and the mean of its condition pictures."""

    inputs = ("image", "condition_images", "prompt")

    def units(self) -> tuple[Unit, ...]:
        means = Unit(name="means", input_params=("condition_images", "target_latents"), output_params=("target_latents",),
                     process=self._difference)  # fmt: skip
        return (*super().units(), means)

    def _difference(self, ctx: Any, condition_images: list[Tensor], target_latents: Tensor) -> dict[str, Tensor]:
        before = [self._target_latents(ctx, picture)["target_latents"] for picture in condition_images]
        return {"target_latents": target_latents - torch.stack(before).mean(0)}
