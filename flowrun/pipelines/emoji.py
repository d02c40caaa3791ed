"""The embedded default: a small FLUX-class transformer on pixels, captions through a frozen MiniLM. No VAE.

A picture's 8x8 tiles become the channels of one token each, which loses nothing: 32x32 pixels are 192 channels on 4x4.

Legend: B rows, P tile side in pixels, C = 3 P^2 channels, h w latent height and width, N = h w picture tokens,
L text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

from flowrun.config import ConfigError
from flowrun.flow.path import wide
from flowrun.flow.schedule import sigmas
from flowrun.graph import Unit
from flowrun.pipelines import Component, Pipeline, Shape
from flowrun.pipelines import _minilm as minilm
from flowrun.pipelines._network import Network, configuration, find_weights
from flowrun.pipelines._precision import dtype_of
from flowrun.pipelines._texts import long_texts

KEY = "model.components.transformer"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `velocity` needs besides x and sigma. text: [B, L, 384]; pooled: [B, 384]; ids: [tokens, 3], rotary."""

    text: Tensor
    pooled: Tensor
    text_ids: Tensor
    picture_ids: Tensor


@dataclass(kw_only=True, slots=True)
class Components:
    transformer: dict[str, Any]  # settings of FluxTransformer2DModel; what is left out keeps the class's own value


@dataclass(kw_only=True, slots=True)
class Latents:
    """clean = (pixels in [-1, 1] - mean) / std, in tiles."""

    patch: int  # tile side in pixels
    mean: float
    std: float


@dataclass(kw_only=True, slots=True)
class Scheduler:
    shift: float  # of the sampling noise levels; 1: evenly spaced


class EmojiPipeline(Pipeline):
    """Needs no `target_moments` unit: the map from pixels to latents is exact, so there is no posterior to keep."""

    inputs = ("image", "prompt")
    conditions = ("prompt_embeds", "pooled_prompt_embeds")
    target = "target_latents"
    lora_targets = {
        "transformer": (
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
            "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
            "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
        )
    }  # fmt: skip

    @dataclass(kw_only=True, slots=True)
    class Config:
        components: Components
        weights: str | None  # a folder with the transformer, a run's directory, or null: random
        text_tokens: int  # tokens of a caption that the transformer sees, cut or padded with zeros
        latents: Latents
        scheduler: Scheduler

        def __post_init__(self) -> None:
            if self.text_tokens < 1:
                raise ConfigError("model.text_tokens", f"is {self.text_tokens}", "give at least 1")
            if self.latents.std <= 0:
                raise ConfigError("model.latents.std", f"is {self.latents.std}", "must be positive")
            if self.latents.patch < 1:
                raise ConfigError("model.latents.patch", f"is {self.latents.patch}", "give at least 1 pixel")
            if self.scheduler.shift <= 0:
                raise ConfigError(
                    "model.scheduler.shift", f"is {self.scheduler.shift}", "must be positive; 1 shifts nothing"
                )
            _check_transformer(
                configuration(FluxTransformer2DModel, self.components.transformer, KEY), self.latents.patch
            )

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        full = configuration(FluxTransformer2DModel, config.components.transformer, KEY)
        folder = find_weights(config.weights, "transformer", full, KEY)
        self.transformer = Network(
            cls=FluxTransformer2DModel, name="transformer", configuration=full, folder=folder, seed=seed
        )
        self.minilm_folder = minilm.folder()

    def components(self) -> dict[str, Component]:
        text = Component(
            name="text_encoder",
            load=lambda: minilm.MiniLM(self.minilm_folder),
            outline=lambda: minilm.outline(self.minilm_folder),
            configure=lambda: minilm.configuration(self.minilm_folder),
            identity=lambda hash_file: minilm.identity(self.minilm_folder, hash_file),
            describe="all-MiniLM-L6-v2",
        )
        return {"text_encoder": text, "transformer": self.transformer.component()}

    def units(self) -> tuple[Unit, ...]:
        latents = self.config.latents
        return (
            Unit(
                name="text",
                input_params=("prompt",),
                output_params=("prompt_embeds", "pooled_prompt_embeds"),
                onload_model_names=("text_encoder",),
                process=self._text,
                process_rows=self._texts,
                settings={"text_tokens": self.config.text_tokens},
            ),
            Unit(
                name="target_latents",
                input_params=("image",),
                output_params=("target_latents",),
                process=self._target_latents,
                settings={"patch": latents.patch, "mean": latents.mean, "std": latents.std},
            ),
        )

    @property
    def reduction(self) -> int:
        return self.config.latents.patch

    def latent_shape(self, shape: Shape) -> tuple[int, ...]:
        if len(shape) != 2:
            raise ConfigError("data", f"rows are videos of {shape[0]} frames, and this model takes pictures", "give it pictures")
        patch = self.config.latents.patch
        height, width = shape
        if height < patch or width < patch or height % patch or width % patch:
            what = f"a picture of {height}x{width} pixels does not divide into tiles of {patch}x{patch}"
            raise ConfigError("data", what, f"choose sizes that are multiples of model.latents.patch = {patch}")
        return 3 * patch**2, height // patch, width // patch

    def schedule(self, steps: int, shape: Shape) -> Tensor:
        return sigmas(steps, self.config.scheduler.shift)  # [steps + 1]

    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> Prepared:
        text = batch["prompt_embeds"]  # [B, L, 384]
        height, width = noise.shape[-2:]
        rows = torch.arange(height, device=noise.device).repeat_interleave(width)  # [N]
        columns = torch.arange(width, device=noise.device).repeat(height)  # [N]
        return Prepared(
            text=text,
            pooled=batch["pooled_prompt_embeds"],
            text_ids=torch.zeros(text.shape[1], 3, device=noise.device),
            picture_ids=torch.stack((torch.zeros_like(rows), rows, columns), dim=1).float(),  # [N, 3]
        )

    def velocity(self, prepared: Prepared, x: Tensor, sigma: Tensor) -> Tensor:
        network = self.models["transformer"]
        dtype = dtype_of(network)
        tokens = x.flatten(2).transpose(1, 2).contiguous()  # [B, N, C]
        out = network(
            hidden_states=tokens.to(dtype),
            encoder_hidden_states=prepared.text.to(dtype),
            pooled_projections=prepared.pooled.to(dtype),
            timestep=sigma,  # the class multiplies by 1000 itself
            img_ids=prepared.picture_ids,
            txt_ids=prepared.text_ids,
            return_dict=False,
        )[0]  # [B, N, C]
        return wide(out).transpose(1, 2).reshape(x.shape)  # [B, C, h, w]; fp32: the loss and the solver need it

    def decode(self, latents: Tensor) -> Tensor:
        c = self.config.latents
        return pixel_shuffle(wide(latents) * c.std + c.mean, c.patch).clamp(-1, 1)  # [B, 3, H, W]

    def long_texts(self, texts: Sequence[str]) -> list[str]:
        rest = "only counts in the pooled embedding (model.text_tokens)"
        return long_texts("all-MiniLM-L6-v2", lambda: minilm.tokenizer(self.minilm_folder), self.config.text_tokens, texts, rest=rest)

    def _text(self, ctx: Any, prompt: str) -> dict[str, Tensor]:
        """prompt_embeds: [L, 384], the first L hidden states, zeros after the last; pooled: [384], the mean of all."""
        return self._cut(ctx.models["text_encoder"](prompt))

    def _texts(self, ctx: Any, rows: Sequence[Mapping[str, str]]) -> list[dict[str, Tensor]]:
        prompts = [row["prompt"] for row in rows]
        return list(map(self._cut, ctx.models["text_encoder"].rows(prompts)))

    def _cut(self, hidden: Tensor) -> dict[str, Tensor]:
        """hidden: [tokens, 384]."""
        length = self.config.text_tokens
        cut = hidden[:length]
        return {
            "prompt_embeds": pad(cut, (0, 0, 0, length - len(cut))),  # [L, 384]
            "pooled_prompt_embeds": hidden.mean(0),  # [384]
        }

    def _target_latents(self, ctx: Any, image: Tensor) -> dict[str, Tensor]:
        """image: uint8 [3, H, W] -> [C, h, w], fp32."""
        c = self.config.latents
        pixels = image.float() / 127.5 - 1  # [3, H, W] in [-1, 1]
        return {"target_latents": pixel_unshuffle((pixels - c.mean) / c.std, c.patch)}


def _check_transformer(full: Mapping[str, Any], patch: int) -> None:
    """Settings that must agree with the data, the text encoder and each other. Raises ConfigError."""
    channels, width = 3 * patch**2, minilm.WIDTH
    wanted = (
        ("patch_size", 1, "tiles are cut by model.latents.patch"),
        ("in_channels", channels, f"3 colours times tiles of {patch}x{patch} pixels"),
        ("joint_attention_dim", width, "the width of MiniLM"),
        ("pooled_projection_dim", width, "the width of MiniLM"),
        ("guidance_embeds", False, "this family samples with two calls instead"),
    )
    for name, value, why in wanted:
        if full[name] != value:
            raise ConfigError(f"{KEY}.{name}", f"is {full[name]!r}", f"must be {value!r}: {why}")
    if full["out_channels"] not in (None, channels):
        raise ConfigError(f"{KEY}.out_channels", f"is {full['out_channels']}", f"must be null or {channels}")
    for name, least in (("num_attention_heads", 1), ("attention_head_dim", 1), ("num_layers", 0), ("num_single_layers", 0)):
        if full[name] < least:
            raise ConfigError(f"{KEY}.{name}", f"is {full[name]}", f"give at least {least}")
    if len(full["axes_dims_rope"]) != 3 or any(type(n) is not int or n < 2 or n % 2 for n in full["axes_dims_rope"]):
        fix = "give three even numbers of channels, for index, row and column"
        raise ConfigError(f"{KEY}.axes_dims_rope", f"is {list(full['axes_dims_rope'])}", fix)
    if sum(full["axes_dims_rope"]) != full["attention_head_dim"]:
        fix = f"their sum must be attention_head_dim = {full['attention_head_dim']}"
        raise ConfigError(f"{KEY}.axes_dims_rope", f"is {list(full['axes_dims_rope'])}", fix)
