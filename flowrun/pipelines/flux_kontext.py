"""FLUX.1 Kontext [dev] (Black Forest Labs 2025, arXiv 2506.15742): FLUX.1 that sees a picture to be changed, as further
tokens behind those of the noise, told apart by the first of their three places.

Legend: B rows, C channels, h w latent height and width, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrun.pipelines._conditions import condition_names
from flowrun.pipelines._flux1 import Flux1


class FluxKontext(Flux1):
    blocks = "FluxKontextAutoBlocks"
    conditions = (*Flux1.conditions, "image_latents")
    rewrites = {"text_encoder": (), "vae_encoder": ()}

    @dataclass(kw_only=True, slots=True)
    class Config(Flux1.Config):
        preferred_sizes: bool  # condition pictures scaled to that of Kontext's own sizes which is nearest in shape

    @property
    def pictures(self) -> tuple[str, ...]:
        return condition_names(1)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "_auto_resize": self.config.preferred_sizes}

    def told(self, conditions: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
        told = super().told(conditions, dtype)
        latents = told["image_latents"]  # [B, C, h, w]
        height, width = (self.reduction * side for side in latents.shape[-2:])
        return {**told, "image_latents": self.pack(latents), "image_height": height, "image_width": width}  # [B, L, 4 C]
