"""Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv 2403.03206): two CLIP encoders, T5, a latent transformer."""

from __future__ import annotations

from flowrun.config import ConfigError
from flowrun.pipelines import Shape, _diffusers
from flowrun.pipelines._diffusers import DiffusersPipeline
from flowrun.pipelines._text_layers import CLIP_LAYERS


class StableDiffusion3(DiffusersPipeline):
    Config = _diffusers.Config
    blocks = "StableDiffusion3AutoBlocks"
    optional = ("text_encoder_3",)
    rewrites = {"text_encoder": ()}
    tokens = {"tokenizer": None, "tokenizer_2": None, "tokenizer_3": "max_sequence_length"}
    lora_targets = {
        "transformer": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        "text_encoder": CLIP_LAYERS,
        "text_encoder_2": CLIP_LAYERS,
    }

    def check(self) -> None:
        c = self.configs
        pooled = c["text_encoder"]["projection_dim"] + c["text_encoder_2"]["projection_dim"]
        self.agree("in_channels", c["vae"]["latent_channels"], "vae.latent_channels")
        self.agree("pooled_projection_dim", pooled, "text_encoder.projection_dim + text_encoder_2.projection_dim")
        if c["text_encoder_3"] is not None:
            self.agree("joint_attention_dim", c["text_encoder_3"]["d_model"], "text_encoder_3.d_model")

    def latent_shape(self, shape: Shape) -> tuple[int, ...]:
        channels, height, width = super().latent_shape(shape)
        most = self.configs["transformer"]["pos_embed_max_size"] * self.patch
        if max(height, width) > most:
            what = f"a picture of {shape[0]}x{shape[1]} pixels is larger than the transformer has places for"
            raise ConfigError("data", what, f"at most {most * self.reduction} pixels on a side")
        return channels, height, width
