"""What the LTX-2 models share (HaCohen et al. 2026, arXiv 2601.03233): Gemma 3's states of a caption, a causal video VAE, a
VAE of the sound's spectrogram, and a transformer of two streams that look at one another.

Both streams have one noise level and stand in one tensor (`_ltx2_streams`), so they are noised, trained and solved together:

    loss = < error of the video > + model.audio_weight < error of the sound >      each a mean over its own latents

which with weight 1 is what Lightricks' own trainer (ltx-trainer) takes. Guidance is classifier-free; that of the sound may
be another. Their pipelines' guidance by skipped layers and by isolated streams is not here, nor is its rescaling.

Legend: B rows, C channels, f h w latent frames, height and width, F H W frames, height and width in pixels, a latents of the
sound, D values of each, K channels and S samples of the sound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.modular_pipelines.ltx2.before_denoise import calculate_shift
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from torch import Tensor, nn

from flowrun.config import ConfigError
from flowrun.flow.guidance import guide
from flowrun.flow.path import wide
from flowrun.graph import Unit
from flowrun.pipelines import Shape, _diffusers
from flowrun.pipelines._diffusers import TIME_UNITS, DiffusersPipeline
from flowrun.pipelines._frames import FirstAlone
from flowrun.pipelines._ltx2_sound import STEP, Mel, heard, moments_unit
from flowrun.pipelines._ltx2_streams import Parts, Streams
from flowrun.pipelines._ltx2_text import OneConnection, OnePrompt
from flowrun.pipelines._precision import dtype_of
from flowrun.pipelines._targets import Target, posterior, target_units
from flowrun.sound import Hearing, Wave

Prepared = Mapping[str, Tensor]
LAYERS = ("to_q", "to_k", "to_v", "to_out.0")  # of both streams and of what they say to one another


class LTX2(FirstAlone, DiffusersPipeline):
    """Text to video with sound. Subclasses say what else the transformer sees."""

    data = "video"
    conditions = ("prompt_embeds", "audio_prompt_embeds", "prompt_mask")
    decoders = ("vae", "audio_vae", "vocoder")
    decode_only = ("vae.decoder", "audio_vae.decoder", "vocoder")
    blocks = "LTX2AutoBlocks"
    workflow = "text2video"
    rewrites = {"text_encoder": (), "connectors": ()}
    tokens = {"tokenizer": "max_sequence_length"}
    patch = 1
    lora_targets = {"transformer": LAYERS, "connectors": LAYERS}
    given: ClassVar[int] = 0  # latent frames, from the first, that are given and not learned

    @dataclass(kw_only=True, slots=True)
    class Config(_diffusers.Config):
        fps: float                    # frames a second, which the sound and the transformer go by; data.fps must be the same
        cross_timestep: bool          # whether a stream is told the other one's time where it looks at it: LTX-2.3, not LTX-2
        audio_weight: float           # of the sound's mean error beside the video's
        audio_guidance: float | None  # classifier-free guidance of the sound; null: sample.guidance

        def __post_init__(self) -> None:
            _diffusers.Config.__post_init__(self)
            if not self.fps > 0:
                raise ConfigError("model.fps", f"is {self.fps}", "give frames a second, e.g. 24")
            if not self.audio_weight >= 0:
                raise ConfigError("model.audio_weight", f"is {self.audio_weight}", "give 0 or more; 1 is Lightricks' own")

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__(config, seed)
        self.inputs = ("video", "audio", "prompt")

    def correct(self, workflow: SequentialPipelineBlocks) -> None:
        others = {n: block for n, block in workflow.sub_blocks.items() if n.split(".")[0] not in ("text_encoder", "duration")}
        workflow.sub_blocks.clear()
        workflow.sub_blocks.update(text_encoder=OnePrompt(), connectors=OneConnection(), **others)

    def check(self) -> None:
        text, vae, audio = (self.configs[name] for name in ("text_encoder", "vae", "audio_vae"))
        width, layers = text["text_config"]["hidden_size"], text["text_config"]["num_hidden_layers"]
        self.require("connectors", "caption_channels", width, "text_encoder's hidden_size")
        self.require("connectors", "text_proj_in_factor", layers + 1, "text_encoder's num_hidden_layers + 1")
        self.agree("in_channels", self.channels, "vae.latent_channels")
        self.agree("audio_in_channels", self.audio_width, "audio_vae.latent_channels in all its bands")
        self.require("audio_vae", "base_channels", self.audio_width, "latent_channels in all its bands")
        self.agree("patch_size", 1, "videos are cut so")
        self.agree("patch_size_t", 1, "videos are cut so")
        self.agree("vae_scale_factors", [self.frame_reduction, self.reduction, self.reduction], "vae's frames and pixels of a latent")
        self.agree("audio_sampling_rate", audio["sample_rate"], "audio_vae.sample_rate")
        self.agree("audio_hop_length", audio["mel_hop_length"], "audio_vae.mel_hop_length")
        if 2 ** (len(audio["ch_mult"]) - 1) != STEP:
            raise ConfigError("model.components.audio_vae.ch_mult", f"is {audio['ch_mult']}", f"give 3 levels: a latent is {STEP} frames")
        if audio["in_channels"] not in (1, 2):
            raise ConfigError("model.components.audio_vae.in_channels", f"is {audio['in_channels']}", "give 1 for mono or 2 for stereo")
        self.require("vocoder", "in_channels", audio["output_channels"] * audio["mel_bins"], "audio_vae's channels in all their bands")
        rate = audio["sample_rate"] // audio["mel_hop_length"] * math.prod(self.configs["vocoder"]["upsample_factors"])
        self.require("vocoder", "output_sampling_rate", rate, "upsample_factors make of audio_vae's frames")
        if vae["timestep_conditioning"]:
            raise ConfigError("model.components.vae.timestep_conditioning", "is true", "only VAEs that are told no time are known")
        for name in ("video", "audio"):
            registers = self.configs["connectors"][f"{name}_connector_num_learnable_registers"]
            if registers and self.config.max_sequence_length % registers:
                what = f"is {self.config.max_sequence_length}, which {registers} registers of a connector do not divide"
                raise ConfigError("model.max_sequence_length", what, f"give a multiple of {registers}")

    def require(self, name: str, setting: str, value: Any, why: str) -> None:
        """As `agree`, for any component. Raises ConfigError."""
        found = self.configs[name][setting]
        if found != value:
            raise ConfigError(f"model.components.{name}.{setting}", f"is {found}", f"must be {value}, as {why}")

    @cached_property
    def reduction(self) -> int:
        return self._outline.spatial_compression_ratio

    @cached_property
    def frame_reduction(self) -> int:
        """Frames for each latent frame but the first."""
        return self._outline.temporal_compression_ratio

    @cached_property
    def _outline(self) -> nn.Module:
        return self.weights.outline("vae")

    @property
    def audio_width(self) -> int:
        """D."""
        audio = self.configs["audio_vae"]
        return audio["latent_channels"] * (audio["mel_bins"] // STEP)

    @property
    def sound(self) -> Hearing:
        audio = self.configs["audio_vae"]
        return Hearing(rate=audio["sample_rate"], channels=audio["in_channels"], fps=self.config.fps)

    @property
    def mel(self) -> Mel:
        audio = self.configs["audio_vae"]
        return Mel(hearing=self.sound, hop=audio["mel_hop_length"], bands=audio["mel_bins"])

    def units(self) -> tuple[Unit, ...]:
        says, _ = target_units(self.config.target, self.moments, self.normalise, {}, "video")
        mode = self.config.target is Target.mode
        joined = Unit(
            name="target_latents",
            input_params=("target_mean", "audio_mean") if mode else ("target_mean", "target_std", "audio_mean", "audio_std"),
            output_params=("target_latents",),
            process=joined_mode if mode else joined_draw,
            random="none" if mode else "per_epoch",
        )
        return (*self.modular.units(self.inputs), *self.image_units(), says, moments_unit(self.mel), joined)

    def image_units(self) -> tuple[Unit, ...]:
        return ()

    @staticmethod
    def moments(vae: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """In the transformer's units: the numbers that make them so are among the VAE's weights. fp32."""
        mean, std = posterior(vae, pixels.transpose(1, 2))  # [B, C, f, h, w]
        middle, width = statistics(vae)
        return (wide(mean) - middle) / width, wide(std) / width

    def normalise(self, raw: Tensor) -> Tensor:
        return raw  # `moments` has done it

    def denormalise(self, latents: Tensor) -> Tensor:
        middle, width = statistics(self.models["vae"])
        return latents * width + middle

    @staticmethod
    def pixels(vae: nn.Module, raw: Tensor) -> Tensor:
        return vae.decode(raw, return_dict=False)[0].transpose(1, 2)  # [B, F, 3, H, W]

    def streams(self, places: Shape) -> Streams:
        """Of latents of (f, h, w)."""
        return Streams(self.channels, (self.mel.latents(self.frames(places)), self.audio_width), tuple(places))

    def parts(self, latents: Tensor) -> tuple[Streams, Parts]:
        streams = self.streams(latents.shape[2:])
        return streams, streams.parts(latents)

    def latent_shape(self, shape: Shape) -> tuple[int, ...]:
        streams = self.streams(self.places(shape))
        if streams.sound[0] < 1:
            what = f"a video of {shape[0]} frames at {self.config.fps:g} a second is too short for any sound"
            raise ConfigError("data", what, f"give more frames, such as {shape[0] + self.frame_reduction}")
        return streams.shape

    def schedule(self, steps: int, shape: Shape) -> Tensor:
        """Both streams' levels, which follow from the number of the video's tokens."""
        scheduler = self.modular.part("scheduler")
        c = scheduler.config
        ends = (c.get("base_image_seq_len", 1024), c.get("max_image_seq_len", 4096), c.get("base_shift", 0.95), c.get("max_shift", 2.05))
        mu = calculate_shift(math.prod(self.latent_shape(shape)[1:]), *ends)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        return scheduler.sigmas.float().cpu()

    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> Prepared:
        return {name: batch[name] for name in self.conditions}

    def velocity(self, prepared: Prepared, x: Tensor, sigma: Tensor) -> Tensor:
        network, (streams, now) = self.models["transformer"], self.parts(x)
        dtype = dtype_of(network)
        frames, height, width = streams.places
        time = sigma * TIME_UNITS
        video, sound = network(
            hidden_states=self.seen(prepared, now.video).to(dtype).flatten(2).transpose(1, 2).contiguous(),  # [B, f h w, C]
            audio_hidden_states=now.sound.to(dtype).contiguous(),
            encoder_hidden_states=prepared["prompt_embeds"].to(dtype),
            audio_encoder_hidden_states=prepared["audio_prompt_embeds"].to(dtype),
            encoder_attention_mask=prepared["prompt_mask"],
            audio_encoder_attention_mask=prepared["prompt_mask"],
            timestep=self.told_time(time, now.video),
            audio_timestep=time,
            sigma=time,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.config.fps,
            audio_num_frames=streams.sound[0],
            use_cross_timestep=self.config.cross_timestep,
            return_dict=False,
        )
        found = self.led(prepared, now.video, wide(video).transpose(1, 2).unflatten(2, streams.places), sigma)
        return streams.join(found, wide(sound), wide(now.rest) / sigma[:, None])  # the rest is led to its zeros

    def seen(self, prepared: Prepared, video: Tensor) -> Tensor:
        """What the transformer sees of the video's latents: the same shape."""
        return video

    def led(self, prepared: Prepared, video: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
        """What becomes of the transformer's velocity [B, C, f, h, w] at the latents `video`."""
        return velocity

    def told_time(self, time: Tensor, video: Tensor) -> Tensor:
        """time: [B] -> as the network takes it for the video's tokens."""
        return time

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        streams, told = self.parts(positive)
        _, other = self.parts(negative)
        own = self.config.audio_guidance
        sound = guide(other.sound, told.sound, guidance if own is None else own)
        return streams.join(guide(other.video, told.video, guidance), sound, told.rest)

    def weigh(self, squares: Tensor) -> Tensor:
        streams, errors = self.parts(squares)
        size, free = squares[0].numel(), errors.video[:, :, self.given :]
        video = torch.cat([torch.zeros_like(errors.video[:, :, : self.given]), free * (size / free[0].numel())], dim=2)
        return streams.join(video, errors.sound * (self.config.audio_weight * size / errors.sound[0].numel()))

    def stream_errors(self, squares: Tensor) -> dict[str, Tensor]:
        errors = self.parts(squares)[1]
        return {"mse_video": errors.video[:, :, self.given :].mean(), "mse_audio": errors.sound.mean()}

    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(self.parts(latents)[1].video)

    @torch.no_grad()
    def sounds(self, latents: Tensor) -> list[Wave]:
        tokens = self.parts(wide(latents))[1].sound
        rate = self.configs["vocoder"]["output_sampling_rate"]
        waves = [heard(self.models["audio_vae"], self.models["vocoder"], row)[0] for row in tokens.split(1)]
        return [Wave(samples=wave.cpu(), rate=rate) for wave in waves]


def statistics(vae: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the VAE's latents, [C, 1, 1, 1] each, fp32."""
    middle, width = (wide(value).view(-1, 1, 1, 1) for value in (vae.latents_mean, vae.latents_std))
    return middle, width / vae.config.scaling_factor


def joined_draw(ctx: Any, target_mean: Tensor, target_std: Tensor, audio_mean: Tensor, audio_std: Tensor) -> dict[str, Tensor]:
    """Means and standard deviations of a video, [C, f, h, w], and of its sound, [a, D] -> a draw of both, joined."""
    drawn = [mean + std * torch.randn(mean.shape, generator=ctx.generator).to(mean.device)
             for mean, std in ((target_mean, target_std), (audio_mean, audio_std))]  # fmt: skip
    return joined_mode(ctx, *drawn)


def joined_mode(ctx: Any, target_mean: Tensor, audio_mean: Tensor) -> dict[str, Tensor]:
    """[C, f, h, w] and [a, D] -> [C + E, f, h, w]."""
    channels, *places = target_mean.shape
    streams = Streams(channels, tuple(audio_mean.shape), tuple(places))
    return {"target_latents": streams.join(target_mean[None], audio_mean[None])[0]}
