"""Stable Diffusion XL (Podell et al. 2023, arXiv 2307.01952): two CLIP encoders, a UNet that predicts noise or v.

It is trained on its own target: the squared error of what the network predicts, at training times that are equally likely
under `task.density=uniform`. Elsewhere it is handled as a flow (flowrun/flow/diffusion.py). The network is told the size of
the picture it makes as the size of the original, and no cropping.

Legend: B rows, C channels, h w latent height and width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrun.config import ConfigError
from flowrun.flow import diffusion
from flowrun.flow.path import wide
from flowrun.pipelines import AdapterNames, Shape, _diffusers
from flowrun.pipelines._diffusers import DiffusersPipeline
from flowrun.pipelines._precision import dtype_of
from flowrun.pipelines._text_layers import CLIP_LAYERS

VELOCITIES = {"epsilon": diffusion.velocity_of_epsilon, "v_prediction": diffusion.velocity_of_v}


@dataclass(frozen=True)
class Prepared:
    prompt: Tensor                # [B, L, D]
    added: Mapping[str, Tensor]   # text_embeds [B, D'], time_ids [B, 6]


class StableDiffusionXL(DiffusersPipeline):
    Config = _diffusers.Parts
    blocks = "StableDiffusionXLAutoBlocks"
    denoisers = ("unet",)
    conditions = ("prompt_embeds", "pooled_prompt_embeds")
    rewrites = {"text_encoder": ()}
    tokens = {"tokenizer": None, "tokenizer_2": None}
    patch = 1
    lora_targets = {"unet": ("to_q", "to_k", "to_v", "to_out.0"), "text_encoder": CLIP_LAYERS, "text_encoder_2": CLIP_LAYERS}

    adapter_names = AdapterNames(
        reader="StableDiffusionXLPipeline",
        kohya={"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"},
    )

    def settings(self) -> dict[str, Any]:
        return {}

    def check(self) -> None:
        c = self.configs
        self.agree("in_channels", self.channels, "vae.latent_channels")
        self.agree("cross_attention_dim", c["text_encoder"]["hidden_size"] + c["text_encoder_2"]["hidden_size"],
                   "text_encoder.hidden_size + text_encoder_2.hidden_size")  # fmt: skip
        told = c["text_encoder_2"]["projection_dim"] + 6 * (c["unet"]["addition_time_embed_dim"] or 0)
        self.agree("projection_class_embeddings_input_dim", told, "text_encoder_2.projection_dim + 6 addition_time_embed_dim")
        if self._prediction not in VELOCITIES:
            raise ConfigError("model.components.scheduler.prediction_type", f"is {self._prediction}", f"known: {', '.join(VELOCITIES)}")

    @property
    def tile(self) -> int:
        """The UNet halves the latents so often."""
        return self.reduction * 2 ** (len(self.configs["unet"]["block_out_channels"]) - 1)

    def schedule(self, steps: int, shape: Shape) -> Tensor:
        scheduler = self.modular.part("scheduler")
        scheduler.set_timesteps(steps)
        ratios = scheduler.sigmas.double().cpu()
        return (ratios / (1 + ratios)).float()  # [steps + 1], the first below 1

    def start(self, noise: Tensor, sigmas: Tensor) -> Tensor:
        """The sampler begins with noise alone, of the variance that a noisy picture has."""
        return wide(noise) * diffusion.scale(sigmas[0], noise)

    def level(self, share: Tensor) -> Tensor:
        return self._times.level(share)

    def error_weight(self, sigma: Tensor) -> Tensor:
        """(error of the prediction / error of the velocity)^2: of noise (1 - sigma)^2, of v also sigma^2 more."""
        noise = (1 - sigma).square()
        return noise if self._prediction == "epsilon" else noise + sigma.square()

    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> Prepared:
        dtype = dtype_of(self.models["unet"])
        height, width = (self.reduction * side for side in noise.shape[-2:])
        told = torch.tensor([height, width, 0, 0, height, width], device=noise.device, dtype=dtype)
        added = {"text_embeds": batch["pooled_prompt_embeds"].to(dtype), "time_ids": told.expand(len(noise), -1)}
        return Prepared(batch["prompt_embeds"].to(dtype), added)

    def velocity(self, prepared: Prepared, x: Tensor, sigma: Tensor) -> Tensor:
        unet = self.models["unet"]
        dtype = dtype_of(unet)
        noisy = (wide(x) / diffusion.scale(sigma, x)).to(dtype)  # [B, C, h, w]
        predicted = unet(noisy, self._times.time(sigma), encoder_hidden_states=prepared.prompt,
                         added_cond_kwargs=prepared.added, return_dict=False)[0]  # fmt: skip
        return VELOCITIES[self._prediction](x, predicted, sigma)

    @property
    def _prediction(self) -> str:
        return self.modular.part("scheduler").config.prediction_type

    @cached_property
    def _times(self) -> diffusion.Times:
        return diffusion.Times(self.modular.part("scheduler").alphas_cumprod)
