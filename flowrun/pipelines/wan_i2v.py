"""Wan 2.1 image to video, 14B (Wan team 2025, arXiv 2503.20314): the first frame's latents beside x, and CLIP's states of it
beside the caption's."""

from __future__ import annotations

from functools import partial

from flowrun.config import ConfigError
from flowrun.graph import Unit
from flowrun.pipelines._wan import LORA_LAYERS
from flowrun.pipelines._wan_image import CONDITION, FromImage, embeds_unit

TEXT_TOKENS = 512  # the transformer takes so many of its last tokens for the caption's, whatever it is given


class WanImageToVideo(FromImage):
    blocks = "WanImage2VideoAutoBlocks"
    workflow = "image2video"
    conditions = ("prompt_embeds", CONDITION, "image_embeds")
    lora_targets = {"transformer": (*LORA_LAYERS, "add_k_proj", "add_v_proj")}

    def check(self) -> None:
        super().check()
        self.agree("image_dim", self.configs["image_encoder"]["hidden_size"], "image_encoder.hidden_size")
        if self.config.max_sequence_length != TEXT_TOKENS:
            fix = f"must be {TEXT_TOKENS}: the transformer takes its last {TEXT_TOKENS} tokens for the caption's"
            raise ConfigError("model.max_sequence_length", f"is {self.config.max_sequence_length}", fix)

    def image_units(self) -> tuple[Unit, ...]:
        return (*super().image_units(), embeds_unit(partial(self.modular.part, "image_processor")))
