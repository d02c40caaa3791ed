"""What the Qwen-Image models share (Qwen team 2025, arXiv 2508.02324): Qwen2.5-VL's states of a caption, a transformer on
packed 2x2 squares.

Captions keep their own length: the tokens of the prompt template around them are cut off, none are filled up.

Legend: B rows, C channels, h w latent height and width, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState
from torch import Tensor

from flowrun.pipelines._causal_vae import CausalVae
from flowrun.pipelines._diffusers import DiffusersPipeline
from flowrun.pipelines._squares import Squares
from flowrun.pipelines._text_layers import LLM_LAYERS


class Qwen(Squares, CausalVae, DiffusersPipeline):
    conditions = ("prompt_embeds", "prompt_embeds_mask")
    ragged = conditions
    lora_targets = {
        "transformer": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        "text_encoder": LLM_LAYERS,
    }

    def check(self) -> None:
        self.agree("in_channels", self.patch**2 * self.channels, "vae.z_dim in squares of 2x2")
        self.agree("out_channels", self.channels, "vae.z_dim")
        self.agree("joint_attention_dim", self.configs["text_encoder"]["text_config"]["hidden_size"], "text_encoder's hidden_size")

    def told(self, conditions: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
        return {**conditions, "prompt_embeds": conditions["prompt_embeds"].to(dtype)}

    def given(self, noise: Tensor) -> dict[str, Any]:
        return {"batch_size": len(noise)}

    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> BlockState:
        prepared = super().begin(batch, sigmas, noise)
        prepared.additional_cond_kwargs = {}  # what the loop makes before its blocks run
        if prepared.prompt_embeds_mask.all():  # no caption is filled up: attention takes a quicker way without a mask
            prepared.prompt_embeds_mask = None
        return prepared

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        """Guided, and each token then as long as without guidance: v |v_pos| / |v|."""
        guided = super().guide(negative, positive, guidance)
        length = [self.pack(v).norm(dim=-1, keepdim=True) for v in (positive, guided)]  # [B, h w / 4, 1]
        return self.unpack(self.pack(guided) * (length[0] / length[1]), guided)
