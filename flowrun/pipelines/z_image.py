"""Z-Image (Tongyi-MAI 2025, arXiv 2511.22699): Qwen3's states of a caption, one stream of text and picture tokens.

The network takes captions as a list, each of its own length; here a batch fills them up and `prompt_mask` says where.

Legend: B rows, C channels, h w latent height and width, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState, SequentialPipelineBlocks
from diffusers.modular_pipelines.z_image.denoise import ZImageLoopBeforeDenoiser
from torch import Tensor

from flowrun.graph import Unit
from flowrun.pipelines import AdapterNames, _diffusers
from flowrun.pipelines._diffusers import TIME_UNITS, DiffusersPipeline
from flowrun.pipelines._text_layers import LLM_LAYERS
from flowrun.pipelines._texts import turn


class ZImage(DiffusersPipeline):
    Config = _diffusers.Config
    blocks = "ZImageAutoBlocks"
    conditions = ("prompt_embeds", "prompt_mask")
    ragged = conditions
    rewrites = {"text_encoder": ()}
    tokens = {"tokenizer": "max_sequence_length"}
    lora_targets = {
        "transformer": ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0",
                        "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
        "text_encoder": LLM_LAYERS,
    }  # fmt: skip

    adapter_names = AdapterNames(reader="ZImagePipeline", comfyui={"transformer": "diffusion_model."},
                                 kohya={"transformer": "lora_unet_"}, lokr={"transformer": "diffusion_model."})  # fmt: skip

    def check(self) -> None:
        self.agree("in_channels", self.channels, "vae.latent_channels")
        self.agree("cap_feat_dim", self.configs["text_encoder"]["hidden_size"], "text_encoder.hidden_size")

    def correct(self, workflow: SequentialPipelineBlocks) -> None:
        workflow.sub_blocks["denoise.denoise"].sub_blocks["before_denoiser"] = WholeTime()

    def units(self) -> tuple[Unit, ...]:
        mask = Unit(name="prompt_mask", input_params=("prompt_embeds",), output_params=("prompt_mask",), process=_mask)
        text, *target = super().units()
        return (text, mask, *target)

    def around(self, tokenizer: Any) -> int:
        return turn(tokenizer, enable_thinking=True)

    def told(self, conditions: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
        lengths = conditions["prompt_mask"].sum(1).tolist()  # B
        embeds = conditions["prompt_embeds"].to(dtype)       # [B, L, D]
        return {"prompt_embeds": [row[:length] for row, length in zip(embeds, lengths, strict=True)], "dtype": dtype}


class WholeTime(ZImageLoopBeforeDenoiser):
    """The pipeline in diffusers tells the time in fp32, its block in the precision of the weights: bf16 cannot tell 750 from
    752."""

    def __call__(self, components: Any, block_state: BlockState, i: int, t: Tensor) -> tuple[Any, BlockState]:
        super().__call__(components, block_state, i, t)
        block_state.timestep = (TIME_UNITS - t.expand(len(block_state.latents))) / TIME_UNITS  # [B], 0 is noise
        return components, block_state


def _mask(ctx: Any, prompt_embeds: Tensor) -> dict[str, Tensor]:
    """prompt_embeds: [L, D] -> ones [L], uint8."""
    return {"prompt_mask": torch.ones(len(prompt_embeds), dtype=torch.uint8)}
