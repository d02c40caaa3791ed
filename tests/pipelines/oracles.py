"""What diffusers' own pipelines say, in flowrun's terms: one oracle for each family.

Legend: B rows, C channels, h w latent height and width, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar
from unittest import mock

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor

from flowrun.pipelines._diffusers import DiffusersPipeline


class Oracle:
    """whole: diffusers' pipeline of the networks, tokenizers and scheduler settings of `ours`."""

    cls: ClassVar[str]
    guided: ClassVar[bool] = True  # whether diffusers' pipeline can subtract a negative prompt

    def __init__(self, ours: DiffusersPipeline) -> None:
        self.ours = ours
        parts = {**self.more(ours), **{name: ours.weights.part(name) for name in ours.names.parts}}
        self.whole: DiffusionPipeline = getattr(diffusers, self.cls)(**ours.models, **parts)
        self.whole.set_progress_bar_config(disable=True)
        self.tokens = getattr(ours.config, "max_sequence_length", None)

    def more(self, ours: DiffusersPipeline) -> dict[str, Any]:
        """Parts that diffusers' pipeline has and ours finds in others."""
        return {}

    def embeddings(self, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        """The conditions of each prompt, encoded together."""
        raise NotImplementedError

    def sampled(self, noise: Tensor, prompts: Sequence[str], steps: int, guidance: float) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1] from noise [B, C, h, w]."""
        height, width = (self.ours.reduction * side for side in noise.shape[-2:])
        given = {"prompt": list(prompts), "num_inference_steps": steps, "output_type": "pt", "height": height, "width": width,
                 "max_sequence_length": self.tokens, "latents": self.packed(noise), **self.said(prompts, guidance)}  # fmt: skip
        return self.whole(**given).images

    def said(self, prompts: Sequence[str], guidance: float) -> dict[str, Any]:
        """Guidance as the pipeline takes it."""
        return {"guidance_scale": guidance}

    def packed(self, noise: Tensor) -> Tensor:
        return noise

    def latents(self, raw: Tensor) -> Tensor:
        """The VAE's sample or mean of a picture, [1, ...] -> the network's [C, h, w]."""
        return ((raw - self.whole.vae.config.shift_factor) * self.whole.vae.config.scaling_factor)[0]

    def levels(self) -> Tensor:
        """Noise levels of the last sampling, from 1 to 0."""
        return self.whole.scheduler.sigmas

    def answer(self, velocity: Tensor, x: Tensor, sigma: Tensor) -> Any:
        """What the network has to return for this velocity at x and sigma, [B, C, h, w] each and [B]."""
        return (velocity,)

    def told(self, sigma: Tensor) -> Tensor:
        """The time that the network is told. [B]"""
        return sigma

    def posterior(self, image: Tensor) -> Any:
        """Of the VAE, for uint8 [3, H, W]."""
        return self.whole.vae.encode(self.whole.image_processor.preprocess(image[None] / 255)).latent_dist

    def decoded(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] -> pictures in [-1, 1]."""
        config = self.whole.vae.config
        return self.whole.vae.decode(latents / config.scaling_factor + config.shift_factor).sample.clamp(-1, 1)


class SD3(Oracle):
    cls = "StableDiffusion3Pipeline"

    def told(self, sigma: Tensor) -> Tensor:
        return 1000 * sigma

    def embeddings(self, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        found = self.whole.encode_prompt(list(prompts), None, None, max_sequence_length=self.tokens)
        return [{"prompt_embeds": e, "pooled_prompt_embeds": p} for e, p in zip(found[0], found[2], strict=True)]


class Flux(Oracle):
    cls = "FluxPipeline"

    def embeddings(self, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        found = self.whole.encode_prompt(list(prompts), None, max_sequence_length=self.tokens)
        return [{"prompt_embeds": e, "pooled_prompt_embeds": p} for e, p in zip(found[0], found[1], strict=True)]

    def said(self, prompts: Sequence[str], guidance: float) -> dict[str, Any]:
        negative = {"negative_prompt": [""] * len(prompts), "true_cfg_scale": guidance} if guidance != 1 else {}
        return {"guidance_scale": self.ours.config.guidance, **negative}

    def answer(self, velocity: Tensor, x: Tensor, sigma: Tensor) -> Any:
        return (self.packed(velocity),)

    def packed(self, noise: Tensor) -> Tensor:
        return self.whole._pack_latents(noise, *noise.shape)


class Flux2(Oracle):
    cls = "Flux2Pipeline"
    guided = False

    def embeddings(self, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        found, _ = self.whole.encode_prompt(list(prompts), max_sequence_length=self.tokens,
                                            text_encoder_out_layers=self.ours.config.text_encoder_out_layers)  # fmt: skip
        return [{"prompt_embeds": row} for row in found]

    def said(self, prompts: Sequence[str], guidance: float) -> dict[str, Any]:
        return {"guidance_scale": self.ours.config.guidance, "text_encoder_out_layers": self.ours.config.text_encoder_out_layers}

    def latents(self, raw: Tensor) -> Tensor:
        vae, squares = self.whole.vae, self.whole._patchify_latents(raw)
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        return ((squares - vae.bn.running_mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1))[0]

    def decoded(self, latents: Tensor) -> Tensor:
        vae = self.whole.vae
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        squares = latents * std.view(1, -1, 1, 1) + vae.bn.running_mean.view(1, -1, 1, 1)
        return vae.decode(self.whole._unpatchify_latents(squares)).sample.clamp(-1, 1)


    def answer(self, velocity: Tensor, x: Tensor, sigma: Tensor) -> Any:
        return (self.whole._pack_latents(velocity),)


class Flux2Klein(Flux2):
    cls = "Flux2KleinPipeline"
    guided = True

    def said(self, prompts: Sequence[str], guidance: float) -> dict[str, Any]:
        return {**super().said(prompts, guidance), "guidance_scale": guidance}


class QwenImage(Oracle):
    cls = "QwenImagePipeline"

    def embeddings(self, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        found, mask = self.whole.encode_prompt(list(prompts), max_sequence_length=self.tokens)
        lengths = [found.shape[1]] * len(found) if mask is None else mask.sum(1).tolist()
        return [{"prompt_embeds": row[:n], "prompt_embeds_mask": torch.ones(n)} for row, n in zip(found, lengths, strict=True)]

    def said(self, prompts: Sequence[str], guidance: float) -> dict[str, Any]:
        return {"negative_prompt": [""] * len(prompts), "true_cfg_scale": guidance} if guidance != 1 else {"true_cfg_scale": 1.0}

    def answer(self, velocity: Tensor, x: Tensor, sigma: Tensor) -> Any:
        return (self.packed(velocity),)

    def packed(self, noise: Tensor) -> Tensor:
        return self.whole._pack_latents(noise, *noise.shape)

    def posterior(self, image: Tensor) -> Any:
        return self.whole.vae.encode(self.whole.image_processor.preprocess(image[None] / 255)[:, :, None]).latent_dist

    def latents(self, raw: Tensor) -> Tensor:
        mean, std = (torch.tensor(self.whole.vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        return ((raw - mean) / std)[0, :, 0]

    def decoded(self, latents: Tensor) -> Tensor:
        mean, std = (torch.tensor(self.whole.vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        return self.whole.vae.decode(latents[:, :, None] * std + mean).sample[:, :, 0].clamp(-1, 1)


class ZImage(Oracle):
    cls = "ZImagePipeline"

    def embeddings(self, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        found, _ = self.whole.encode_prompt(list(prompts), max_sequence_length=self.tokens)
        return [{"prompt_embeds": row, "prompt_mask": torch.ones(len(row))} for row in found]

    def said(self, prompts: Sequence[str], guidance: float) -> dict[str, Any]:
        return {"guidance_scale": guidance - 1}  # there cond + g (cond - uncond)

    def answer(self, velocity: Tensor, x: Tensor, sigma: Tensor) -> Any:
        return (list(-velocity[:, :, None]),)

    def told(self, sigma: Tensor) -> Tensor:
        return 1 - sigma


class SDXL(Oracle):
    cls = "StableDiffusionXLPipeline"

    def embeddings(self, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        found, _, pooled, _ = self.whole.encode_prompt(list(prompts), do_classifier_free_guidance=False)
        return [{"prompt_embeds": e, "pooled_prompt_embeds": p} for e, p in zip(found, pooled, strict=True)]

    def sampled(self, noise: Tensor, prompts: Sequence[str], steps: int, guidance: float) -> Tensor:
        height, width = (self.ours.reduction * side for side in noise.shape[-2:])
        return self.whole(list(prompts), height=height, width=width, num_inference_steps=steps, guidance_scale=guidance,
                          negative_prompt=[""] * len(prompts), latents=noise, output_type="pt").images  # fmt: skip

    def answer(self, velocity: Tensor, x: Tensor, sigma: Tensor) -> Any:
        return (x + (1 - sigma.view(-1, 1, 1, 1)) * velocity,)  # the noise

    def told(self, sigma: Tensor) -> Tensor:
        return self.whole.scheduler.timesteps[(self.levels()[:-1, None] - sigma).abs().argmin(0)]

    def levels(self) -> Tensor:
        ratios = self.whole.scheduler.sigmas.double()  # of noise to clean
        return (ratios / (1 + ratios)).float()

    def latents(self, raw: Tensor) -> Tensor:
        return (raw * self.whole.vae.config.scaling_factor)[0]

    def decoded(self, latents: Tensor) -> Tensor:
        return self.whole.vae.decode(latents / self.whole.vae.config.scaling_factor).sample.clamp(-1, 1)


class Editing:
    """Pipelines that see pictures, those of one row at a time."""

    def sampled(self, noise: Tensor, prompts: Sequence[str], steps: int, guidance: float,
                pictures: Sequence[Sequence[Image.Image]]) -> Tensor:  # fmt: skip
        """pictures: those that each row sees."""
        height, width = (self.ours.reduction * side for side in noise.shape[-2:])
        common = {"num_inference_steps": steps, "output_type": "pt", "height": height, "width": width, **self.set(height * width)}
        return torch.cat([
            self.whole(image=list(seen), prompt=prompt, latents=self.packed(start), **common, **self.said([prompt], guidance)).images
            for start, prompt, seen in zip(noise.split(1), prompts, pictures, strict=True)
        ])  # fmt: skip

    def set(self, area: int) -> dict[str, Any]:
        """Further settings of the call. area: pixels of what is drawn."""
        return {"max_sequence_length": self.tokens}

    def heard(self, noise: Tensor, prompt: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """What the network hears at first of one row beside the noise: tokens of the caption, tokens of the pictures."""
        told: list[dict[str, Any]] = []
        hook = self.whole.transformer.register_forward_pre_hook(lambda _, __, named: told.append(named), with_kwargs=True)
        try:
            self.sampled(noise, [prompt], 2, 1.0, [pictures])
        finally:
            hook.remove()
        own = noise[0, 0].numel() // self.ours.patch**2
        return {"prompt_embeds": told[0]["encoder_hidden_states"], "image_latents": told[0]["hidden_states"][:, own:]}


class FluxKontext(Editing, Flux):
    cls = "FluxKontextPipeline"

    def set(self, area: int) -> dict[str, Any]:
        return {**super().set(area), "_auto_resize": self.ours.config.preferred_sizes, "max_area": area}


class Flux2Edit(Editing, Flux2):
    pass


class Flux2KleinEdit(Editing, Flux2Klein):
    pass


class QwenImageEdit(Editing, QwenImage):
    cls = "QwenImageEditPlusPipeline"

    def more(self, ours: DiffusersPipeline) -> dict[str, Any]:
        return {"tokenizer": ours.weights.part("processor").tokenizer}

    def set(self, area: int) -> dict[str, Any]:
        return {}

    def sampled(self, *arguments: Any) -> Tensor:
        config = self.ours.config
        areas = {"VAE_IMAGE_SIZE": config.latents_area, "CONDITION_IMAGE_SIZE": config.reading_area}
        with mock.patch.multiple(pipeline_qwenimage_edit_plus, **areas):
            return super().sampled(*arguments)


ORACLES: dict[str, type[Oracle]] = {
    "sd3": SD3, "flux": Flux, "flux2": Flux2, "flux2_klein": Flux2Klein, "qwen_image": QwenImage, "z_image": ZImage,
    "sdxl": SDXL,
    "flux_kontext": FluxKontext, "flux2_edit": Flux2Edit, "flux2_klein_edit": Flux2KleinEdit, "qwen_image_edit": QwenImageEdit,
}  # fmt: skip
