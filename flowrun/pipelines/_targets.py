"""The training target through a VAE, in two units: what the VAE says of a picture, and the latents that follow from it.

    target_moments   image -> mean, std of the posterior; calls the VAE, cacheable
    target_latents   normalise(mean + std noise), drawn anew in each epoch, or normalise(mean); cheap

Legend: C channels, h w latent height and width, H W picture height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.flow.path import wide
from flowrun.graph import Unit

Normalise = Callable[[Tensor], Tensor]
Moments = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]


class Target(Enum):
    draw = "draw"
    mode = "mode"


def target_units(target: Target, moments: Moments, normalise: Normalise, settings: Mapping[str, Any]) -> tuple[Unit, Unit]:
    """moments: VAE, pixels [B, 3, H, W] in [-1, 1] -> mean and standard deviation of their latents, [B, C, h, w] each.

    normalise: the VAE's latents -> the network's; settings: the numbers that it uses."""
    says = Unit(
        name="target_moments",
        input_params=("image",),
        output_params=("target_mean", "target_std"),
        onload_model_names=("vae",),
        process=partial(_moments, moments),
        process_rows=partial(_moments_of_rows, moments),
    )
    mode = target is Target.mode
    latents = Unit(
        name="target_latents",
        input_params=("target_mean",) if mode else ("target_mean", "target_std"),
        output_params=("target_latents",),
        process=partial(_mode if mode else _draw, normalise),
        random="none" if mode else "per_epoch",
        settings=settings,
    )
    return says, latents


def posterior(vae: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the VAE's latents."""
    found = vae.encode(pixels).latent_dist
    return found.mean, found.std


def _moments(moments: Moments, ctx: Any, image: Tensor) -> dict[str, Tensor]:
    """image: uint8 [3, H, W] -> mean and standard deviation of its latents, each [C, h, w]."""
    return _moments_of_rows(moments, ctx, [{"image": image}])[0]


def _moments_of_rows(moments: Moments, ctx: Any, rows: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    vae = ctx.models["vae"]
    weight = next(vae.parameters())
    images = torch.stack([row["image"] for row in rows]).to(weight.device)  # uint8 [B, 3, H, W]
    mean, std = moments(vae, (images.float() / 127.5 - 1).to(weight.dtype))  # pixels in [-1, 1]
    return [{"target_mean": m, "target_std": s} for m, s in zip(mean, std, strict=True)]


def _draw(normalise: Normalise, ctx: Any, target_mean: Tensor, target_std: Tensor) -> dict[str, Tensor]:
    """normalise(mean + std noise): [C, h, w], fp32."""
    noise = torch.randn(target_mean.shape, generator=ctx.generator).to(target_mean.device)
    return {"target_latents": normalise(wide(target_mean) + wide(target_std) * noise)}


def _mode(normalise: Normalise, ctx: Any, target_mean: Tensor) -> dict[str, Tensor]:
    """normalise(mean): [C, h, w], fp32."""
    return {"target_latents": normalise(wide(target_mean))}
