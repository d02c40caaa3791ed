"""What the FLUX.2 models share (Black Forest Labs 2025): layers of a language model's states, a transformer on 2x2 squares
of latents.

The VAE normalises by the running statistics of a batch normalisation over those squares, which lie among its weights; so
the target's moments come normalised, and what is left to do without the VAE is the cutting into squares.

An editing model sees pictures of a row as further tokens behind those of the noise, told apart by the first of their four
places. Pictures of more than a megapixel are scaled down to it.

Legend: B rows, N condition pictures of a row, C channels, h w height and width in squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.modular_pipelines.flux2.before_denoise import Flux2PrepareImageLatentsStep
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowrun.config import ConfigError
from flowrun.pipelines import AdapterNames, _diffusers
from flowrun.pipelines._conditions import condition_names
from flowrun.pipelines._diffusers import DiffusersPipeline
from flowrun.pipelines._guided import check_guidance, told_guidance
from flowrun.pipelines._squares import Squares
from flowrun.pipelines._targets import posterior
from flowrun.pipelines._text_layers import LLM_LAYERS

SIDE = 2  # of a square
LEAST_SIDE, MOST_ASPECT = 64, 8  # of a condition picture, as diffusers checks it
# The output is a list of two modules in double blocks, a layer in single ones.
LORA_LAYERS = r".*attn\.(to_[qkv]|add_[qkv]_proj|to_add_out|to_out\.0|to_qkv_mlp_proj)|single_transformer_blocks\.\d+\.attn\.to_out"

# ComfyUI and kohya hold attention's inputs as one layer, and call blocks as the first release did.
NAMES = AdapterNames(
    reader="Flux2Pipeline", comfyui={"transformer": "diffusion_model."}, kohya={"transformer": "lora_unet_"},
    lokr={"transformer": "lycoris_"},
    renamed={
        "double_blocks.{}.img_attn.qkv": [f"transformer_blocks.{{}}.attn.to_{x}" for x in "qkv"],
        "double_blocks.{}.img_attn.proj": ["transformer_blocks.{}.attn.to_out.0"],
        "double_blocks.{}.txt_attn.qkv": [f"transformer_blocks.{{}}.attn.add_{x}_proj" for x in "qkv"],
        "double_blocks.{}.txt_attn.proj": ["transformer_blocks.{}.attn.to_add_out"],
        "double_blocks.{}.img_mlp.0": ["transformer_blocks.{}.ff.linear_in"],
        "double_blocks.{}.img_mlp.2": ["transformer_blocks.{}.ff.linear_out"],
        "double_blocks.{}.txt_mlp.0": ["transformer_blocks.{}.ff_context.linear_in"],
        "double_blocks.{}.txt_mlp.2": ["transformer_blocks.{}.ff_context.linear_out"],
        "single_blocks.{}.linear1": ["single_transformer_blocks.{}.attn.to_qkv_mlp_proj"],
        "single_blocks.{}.linear2": ["single_transformer_blocks.{}.attn.to_out"],
    },
)  # fmt: skip


class Flux2(Squares, DiffusersPipeline):
    tokens = {"tokenizer": "max_sequence_length"}
    patch = 1
    lora_targets = {"transformer": LORA_LAYERS, "text_encoder": LLM_LAYERS}
    adapter_names = NAMES

    @dataclass(kw_only=True, slots=True)
    class Config(_diffusers.Config):
        text_encoder_out_layers: list[int]  # whose states are joined, as wide as the transformer takes them
        guidance: float | None              # told to a network that was distilled from guided samples; null for others
        conditions: int                     # pictures of a row that are seen: condition, condition_2 ...; 0: text to image

    @property
    def pictures(self) -> tuple[str, ...]:
        return condition_names(self.config.conditions)

    @property
    def conditions(self) -> tuple[str, ...]:
        return ("prompt_embeds", *(["image_latents"] if self.pictures else []))

    @property
    def rewrites(self) -> dict[str, tuple[str, ...]]:
        return {"text_encoder": (), **({"vae_encoder": ()} if self.pictures else {})}

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "text_encoder_out_layers": tuple(self.config.text_encoder_out_layers)}

    def check(self) -> None:
        if self.config.conditions < 0:
            raise ConfigError("model.conditions", f"is {self.config.conditions}", "give a number of pictures; 0: text to image")
        text, layers = self.configs["text_encoder"], self.config.text_encoder_out_layers
        text = text.get("text_config", text)
        depth = text["num_hidden_layers"]
        if not layers or not all(0 <= layer <= depth for layer in layers):
            raise ConfigError("model.text_encoder_out_layers", f"is {layers}", f"give layers from 0 to {depth}")
        self.agree("in_channels", self.channels, "vae.latent_channels in squares of 2x2")
        self.agree("joint_attention_dim", len(layers) * text["hidden_size"], "text_encoder's hidden_size, once for each layer")
        check_guidance(self.config.guidance, self.configs["transformer"])

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        height, width = size
        if self.pictures and (min(size) < LEAST_SIDE or max(size) > MOST_ASPECT * min(size)):
            what = f"FLUX.2 sees no condition picture of {height}x{width} pixels"
            fix = f"choose sizes with both sides at least {LEAST_SIDE}, one at most {MOST_ASPECT} times the other"
            raise ConfigError("data", what, fix)
        return super().latent_shape(size)

    def told(self, conditions: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
        told = super().told(conditions, dtype)
        if not self.pictures:
            return told
        pictures = told["image_latents"].unbind(1)  # N of [B, 4 C, h, w]
        places = Flux2PrepareImageLatentsStep._prepare_image_ids([picture[:1] for picture in pictures])  # [1, N h w, 4]
        tokens = torch.cat([self.pack(picture) for picture in pictures], dim=1)  # [B, N h w, 4 C]
        return {**told, "image_latents": tokens, "image_latent_ids": places.expand(len(tokens), -1, -1).to(tokens.device)}

    def given(self, noise: Tensor) -> dict[str, Any]:
        return {"latents": noise, "batch_size": len(noise), **told_guidance(self.config.guidance, noise)}

    def statistics(self) -> dict[str, Any]:
        return {}

    def normalise(self, raw: Tensor) -> Tensor:
        """[C, 2 h, 2 w], normalised -> [4 C, h, w]."""
        return pixel_unshuffle(raw, SIDE)

    def denormalise(self, latents: Tensor) -> Tensor:
        return latents

    @staticmethod
    def moments(vae: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (pixel_unshuffle(found, SIDE) for found in posterior(vae, pixels))  # [B, 4 C, h, w]
        centre, scale = _statistics(vae)
        return pixel_shuffle((mean - centre) / scale, SIDE), pixel_shuffle(std / scale, SIDE)

    @staticmethod
    def pixels(vae: nn.Module, raw: Tensor) -> Tensor:
        centre, scale = _statistics(vae)
        return vae.decode(pixel_shuffle(raw * scale + centre, SIDE), return_dict=False)[0]

    @property
    def channels(self) -> int:
        return SIDE**2 * self.configs["vae"]["latent_channels"]

    @property
    def reduction(self) -> int:
        return SIDE * super().reduction


def _statistics(vae: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of a square, [4 C, 1, 1]."""
    variance = vae.bn.running_var + vae.config.batch_norm_eps
    return vae.bn.running_mean[:, None, None], variance.sqrt()[:, None, None]
