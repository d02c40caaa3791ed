"""What diffusers' LTX-2 pipelines say, in flowrun's terms.

Legend: B rows, C channels, f h w latent frames, height and width, F H W frames, height and width in pixels, a latents of the
sound, D values of each, K channels and S samples of the sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline
from torch import Tensor

from flowrun.pipelines._diffusers import DiffusersPipeline

OFF = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0,
       "audio_guidance_rescale": 0.0, "spatio_temporal_guidance_blocks": None}  # fmt: skip


class LTX2Oracle:
    """whole: diffusers' pipeline of the networks, tokenizer and scheduler settings of `ours`."""

    cls: ClassVar[type[DiffusionPipeline]] = LTX2Pipeline

    def __init__(self, ours: DiffusersPipeline) -> None:
        self.ours = ours
        self.whole = self.cls(**ours.models, **{name: ours.weights.part(name) for name in ours.names.parts})
        self.whole.set_progress_bar_config(disable=True)

    def texts(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """What the video and its sound are told, and the mask of both."""
        tokens = self.ours.config.max_sequence_length
        states, mask, _, _ = self.whole.encode_prompt(list(prompts), do_classifier_free_guidance=False, max_sequence_length=tokens)
        return self.whole.connectors(states, mask, padding_side=self.whole.tokenizer.padding_side)

    def embeddings(self, prompts: Sequence[str]) -> Tensor:
        return self.texts(prompts)[0]

    def sampled(self, noise: Tensor, prompts: Sequence[str], videos: Sequence[Tensor], steps: int, guidance: float) -> Tensor:
        """Videos [B, F, 3, H, W] in [0, 1] from joined noise, each row alone."""
        rows = zip(noise.split(1), prompts, videos, strict=True)
        return torch.cat([self.row(*row, steps, guidance, guidance)[0] for row in rows])

    def row(self, noise: Tensor, prompt: str, video: Tensor, steps: int, guidance: float, audio_guidance: float,
            output: str = "pt") -> tuple[Tensor, Tensor]:  # fmt: skip
        """A video [1, F, 3, H, W] and its sound [1, K, S], or with output=latent both in the VAEs' units."""
        frames, _, height, width = video.shape
        _, parts = self.ours.parts(noise)
        vae = self.whole.audio_vae
        given = {"prompt": prompt, "negative_prompt": "", "height": height, "width": width, "num_frames": frames,
                 "frame_rate": self.ours.config.fps, "num_inference_steps": steps, "guidance_scale": guidance,
                 "audio_guidance_scale": audio_guidance, "latents": self.start(parts.video, video),
                 "audio_latents": parts.sound * vae.latents_std + vae.latents_mean,  # it takes the VAE's
                 "max_sequence_length": self.ours.config.max_sequence_length, "use_cross_timestep": self.ours.config.cross_timestep,
                 "output_type": output, **OFF, **self.said(video)}  # fmt: skip
        return self.whole(**given, return_dict=False)

    def said(self, video: Tensor) -> dict[str, Any]:
        return {}

    def start(self, noise: Tensor, video: Tensor) -> Tensor:
        """[1, C, f, h, w] -> [1, f h w, C]."""
        return self.whole._pack_latents(noise)

    def posterior(self, video: Tensor) -> Any:
        """Of the VAE, for uint8 [F, 3, H, W]."""
        return self.whole.vae.encode(self.whole.video_processor.preprocess_video(video[None] / 255)).latent_dist

    def latents(self, raw: Tensor) -> Tensor:
        """The VAE's sample or mean of a video, [1, ...] -> the network's [C, f, h, w]."""
        vae = self.whole.vae
        return self.whole._normalize_latents(raw, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)[0]

    def decoded(self, latents: Tensor) -> Tensor:
        """Joined -> videos [B, F, 3, H, W] in [-1, 1]."""
        return self.whole.vae.decode(self.raw(self.ours.parts(latents)[1].video)).sample.clamp(-1, 1).transpose(1, 2)

    def raw(self, video: Tensor) -> Tensor:
        """The network's latents of videos -> the VAE's."""
        vae = self.whole.vae
        return self.whole._denormalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)

    def sounds(self, latents: Tensor) -> Tensor:
        """Joined -> [B, K, S]."""
        vae = self.whole.audio_vae
        raw = self.whole._denormalize_audio_latents(self.ours.parts(latents)[1].sound, vae.latents_mean, vae.latents_std)
        bands = vae.config.mel_bins // self.whole.audio_vae_mel_compression_ratio
        return self.whole.vocoder(vae.decode(self.whole._unpack_audio_latents(raw, raw.shape[1], bands)).sample)


class LTX2FromImage(LTX2Oracle):
    cls = LTX2ImageToVideoPipeline

    def said(self, video: Tensor) -> dict[str, Any]:
        return {"image": video[:1] / 255, "image_crf": 0}

    def start(self, noise: Tensor, video: Tensor) -> Tensor:
        """It takes the VAE's, [1, C, f, h, w], and where latents are given the first frame's are among them."""
        return self.raw(torch.cat([self.condition(video)[None], noise[:, :, 1:]], dim=2))

    def condition(self, video: Tensor) -> Tensor:
        """The latents of the first frame, [C, 1, h, w]."""
        frames, _, height, width = video.shape
        image = self.whole.video_processor.preprocess(video[:1] / 255, height=height, width=width)
        start, mask = self.whole.prepare_latents(image, 1, self.ours.channels, height, width, frames, dtype=torch.float32)
        places = self.ours.latent_shape((frames, height, width))[1:]
        assert mask.view(places)[0].all() and not mask.view(places)[1:].any()
        return self.whole._unpack_latents(start, *places)[0, :, :1]
