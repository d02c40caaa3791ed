"""The training target through a VAE, in two units: what the VAE says of a picture, and the latents that follow from it.

    target_moments   image or video -> mean, std of the posterior; calls the VAE, cacheable
    target_latents   normalise(mean + std noise), drawn anew in each epoch, or normalise(mean); cheap

Legend: C channels, f h w latent frames, height and width (pictures have no f), F H W the same in pixels.
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
from flowrun.pipelines._precision import dtype_of

Normalise = Callable[[Tensor], Tensor]
Moments = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]


class Target(Enum):
    draw = "draw"
    mode = "mode"


def target_units(
    target: Target, moments: Moments, normalise: Normalise, settings: Mapping[str, Any], data: str = "image"
) -> tuple[Unit, Unit]:
    """moments: VAE, pixels [B, (F,) 3, H, W] in [-1, 1] -> mean and standard deviation of their latents, [B, C, (f,) h, w] each.

    data: what the rows' pixels are called, image or video. normalise: the VAE's latents -> the network's; settings: the
    numbers that it uses."""
    says = Unit(
        name="target_moments",
        input_params=(data,),
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


def in_units(pixels: Tensor, vae: nn.Module) -> Tensor:
    """uint8 -> [-1, 1], on the VAE's device and in its precision; the same shape."""
    weight = next(vae.parameters())
    return (pixels.to(weight.device).float() / 127.5 - 1).to(dtype_of(vae))


def _moments(moments: Moments, ctx: Any, **pixels: Tensor) -> dict[str, Tensor]:
    """uint8 [(F,) 3, H, W] -> mean and standard deviation of its latents, each [C, (f,) h, w]."""
    return _moments_of_rows(moments, ctx, [pixels])[0]


def _moments_of_rows(moments: Moments, ctx: Any, rows: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    vae = ctx.models["vae"]
    mean, std = moments(vae, in_units(torch.stack([pixels for row in rows for pixels in row.values()]), vae))
    return [{"target_mean": m, "target_std": s} for m, s in zip(mean, std, strict=True)]


def _draw(normalise: Normalise, ctx: Any, target_mean: Tensor, target_std: Tensor) -> dict[str, Tensor]:
    """normalise(mean + std noise): [C, (f,) h, w], fp32."""
    noise = torch.randn(target_mean.shape, generator=ctx.generator).to(target_mean.device)
    return {"target_latents": normalise(wide(target_mean) + wide(target_std) * noise)}


def _mode(normalise: Normalise, ctx: Any, target_mean: Tensor) -> dict[str, Tensor]:
    """normalise(mean): [C, (f,) h, w], fp32."""
    return {"target_latents": normalise(wide(target_mean))}
