"""Wan from an image: the first frame is given, by default the video's own.

    image_condition_latents   VAE(first frame, then grey frames): [C, f, h, w], beside x for the transformer
    mask                      1 in the first latent frame, 0 in the others, once for each of the t frames that make one

Legend: B rows, C channels, f h w latent frames, height and width, F H W frames, height and width in pixels, t frames for
each latent frame but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrun.flow.path import wide
from flowrun.graph import Unit
from flowrun.pipelines._targets import Normalise, in_units, posterior
from flowrun.pipelines._wan import Prepared, Wan

CONDITION = "image_condition_latents"


class FromImage(Wan):
    """Before `Wan` or a kind of it among the bases of a family."""

    conditions = ("prompt_embeds", CONDITION)

    @property
    def seen_channels(self) -> int:
        return 2 * self.channels + self.frame_reduction

    @property
    def seen_as(self) -> str:
        return "twice vae.z_dim and a mask for each frame of a latent frame"

    def units(self) -> tuple[Unit, ...]:
        text, *_, moments, target = super().units()
        return text, *self.image_units(), moments, target

    def image_units(self) -> tuple[Unit, ...]:
        return (condition_unit(self.normalise, self.statistics(), grey=True),)

    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> Prepared:
        condition = batch[CONDITION]  # [B, C, f, h, w]
        mask = condition.new_zeros(len(condition), self.frame_reduction, *condition.shape[2:])
        mask[:, :, 0] = 1
        return {**super().begin(batch, sigmas, noise), CONDITION: torch.cat([mask, condition], dim=1)}

    def seen(self, prepared: Prepared, x: Tensor) -> Tensor:
        return torch.cat([x, prepared[CONDITION]], dim=1)  # [B, 2 C + t, f, h, w]


def condition_unit(normalise: Normalise, settings: Mapping[str, Any], grey: bool) -> Unit:
    """normalise: the VAE's latents -> the network's; settings: the numbers that it uses. grey: whether grey frames follow
    the first, as many as the video has."""
    return Unit(
        name=CONDITION,
        input_params=("video",),
        output_params=(CONDITION,),
        onload_model_names=("vae",),
        process=partial(_condition, normalise, grey),
        settings={**settings, "grey": grey},
    )


def embeds_unit(image_processor: Callable[[], Any]) -> Unit:
    """image_processor: gives the one that belongs to the image encoder."""
    return Unit(
        name="image_encoder",
        input_params=("video",),
        output_params=("image_embeds",),
        onload_model_names=("image_encoder",),
        process=partial(_embeds, image_processor),
    )


def _condition(normalise: Normalise, grey: bool, ctx: Any, video: Tensor) -> dict[str, Tensor]:
    """video: uint8 [F, 3, H, W] -> [C, f, h, w], or [C, 1, h, w] of the first frame alone, fp32."""
    vae = ctx.models["vae"]
    frames = in_units(video[:1], vae)  # [1, 3, H, W]
    if grey:
        frames = torch.cat([frames, frames.new_zeros(len(video) - 1, *frames.shape[1:])])
    mean, _ = posterior(vae, frames.transpose(0, 1)[None])  # [1, C, f, h, w]
    return {CONDITION: normalise(wide(mean[0]))}


def _embeds(image_processor: Callable[[], Any], ctx: Any, video: Tensor) -> dict[str, Tensor]:
    """video: uint8 [F, 3, H, W] -> the states of its first frame before the image encoder's last layer, [L, D]."""
    encoder = ctx.models["image_encoder"]
    picture = video[0].permute(1, 2, 0).cpu().numpy()  # uint8 [H, W, 3]
    pixels = image_processor()(images=picture, return_tensors="pt")["pixel_values"].to(encoder.device)  # [1, 3, S, S]
    return {"image_embeds": encoder(pixels, output_hidden_states=True).hidden_states[-2][0]}
