"""Qwen-Image-Edit-2509 and -2511 (Qwen team 2025): Qwen-Image that sees pictures to be changed, twice: the text encoder
reads them before the caption, and the transformer their latents, as further tokens behind those of the noise.

Each is scaled to about the same number of pixels, whatever its own size, more for the latents than for the reading.

Legend: B rows, N condition pictures of a row, C channels, h w latent height and width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import ModularPipeline, PipelineState, SequentialPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from diffusers.modular_pipelines.qwenimage.encoders import QwenImageEditPlusResizeStep
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from PIL import Image
from torch import Tensor

from flowrun.config import ConfigError
from flowrun.pipelines import _diffusers
from flowrun.pipelines._conditions import condition_names
from flowrun.pipelines._qwen import Qwen

LEAST_AREA = 32**2  # sides are rounded to multiples of 32


class QwenImageEdit(Qwen):
    blocks = "QwenImageEditPlusAutoBlocks"
    workflow = None
    conditions = (*Qwen.conditions, "image_latents")
    ragged = Qwen.conditions
    rewrites = {"text_encoder": (), "vae_encoder": ()}
    tokens = {}  # captions are not cut

    @dataclass(kw_only=True, slots=True)
    class Config(_diffusers.Parts):
        conditions: int     # pictures of a row that are seen: condition, condition_2 ...
        latents_area: int   # pixels, about, to which each is scaled for its latents
        reading_area: int   # pixels, about, to which each is scaled for the text encoder

        def __post_init__(self) -> None:
            for name, least in (("conditions", 1), ("latents_area", LEAST_AREA), ("reading_area", LEAST_AREA)):
                if getattr(self, name) < least:
                    raise ConfigError(f"model.{name}", f"is {getattr(self, name)}", f"give at least {least}")

    @property
    def pictures(self) -> tuple[str, ...]:
        return condition_names(self.config.conditions)

    def correct(self, workflow: SequentialPipelineBlocks) -> None:
        for step in ("text_encoder", "vae_encoder"):
            workflow.sub_blocks[step].sub_blocks["resize"] = Resize()

    def settings(self) -> dict[str, Any]:
        return {"latents_area": self.config.latents_area, "reading_area": self.config.reading_area}

    def check(self) -> None:
        super().check()
        if self.config.weights is not None and find_spec("torchvision") is None:
            what = f"the processor of {self.config.weights} needs torchvision, which is not installed"
            raise ConfigError("model.weights", what, "install the build that fits your torch: pip install torchvision")

    def told(self, conditions: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
        latents = conditions["image_latents"].to(dtype)  # [B, N, C, 1, h, w]
        return {**super().told(conditions, dtype), "image_latents": list(latents.unbind(1))}


class Resize(QwenImageEditPlusResizeStep):
    """Theirs, whose areas are fixed at 1024x1024 and 384x384."""

    @property
    def inputs(self) -> list[InputParam]:
        return [*super().inputs, InputParam("latents_area"), InputParam("reading_area")]

    def __call__(self, components: ModularPipeline, state: PipelineState) -> tuple[ModularPipeline, PipelineState]:
        s = self.get_block_state(state)
        pictures = s.image if isinstance(s.image, list) else [s.image]
        resize = components.image_resize_processor.resize

        def scaled(picture: Image.Image, area: int) -> Image.Image:
            width, height, _ = calculate_dimensions(area, picture.width / picture.height)
            return resize(picture, height=height, width=width)

        s.resized_image = [scaled(picture, s.latents_area) for picture in pictures]
        s.resized_cond_image = [scaled(picture, s.reading_area) for picture in pictures]
        self.set_block_state(state, s)
        return components, state
