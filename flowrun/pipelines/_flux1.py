"""What the FLUX.1 models share (Black Forest Labs 2024): CLIP's pooled state, T5, a transformer on packed 2x2 squares of
latents. [dev] was distilled from guided samples and is told their guidance; [schnell] is not told any.

Legend: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowrun.pipelines import _diffusers
from flowrun.pipelines._diffusers import DiffusersPipeline
from flowrun.pipelines._guided import check_guidance, told_guidance
from flowrun.pipelines._squares import Squares
from flowrun.pipelines._text_layers import CLIP_LAYERS


class Flux1(Squares, DiffusersPipeline):
    rewrites = {"text_encoder": ()}
    tokens = {"tokenizer": None, "tokenizer_2": "max_sequence_length"}
    lora_targets = {
        "transformer": (
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
            "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
            "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
        ),
        "text_encoder": CLIP_LAYERS,
    }  # fmt: skip

    @dataclass(kw_only=True, slots=True)
    class Config(_diffusers.Config):
        guidance: float | None  # told to a network that was distilled from guided samples; null for others

    def check(self) -> None:
        c = self.configs
        self.agree("in_channels", self.patch**2 * c["vae"]["latent_channels"], "vae.latent_channels in squares of 2x2")
        self.agree("pooled_projection_dim", c["text_encoder"]["hidden_size"], "text_encoder.hidden_size")
        self.agree("joint_attention_dim", c["text_encoder_2"]["d_model"], "text_encoder_2.d_model")
        check_guidance(self.config.guidance, c["transformer"])

    def given(self, noise: Tensor) -> dict[str, Any]:
        return told_guidance(self.config.guidance, noise)
