"""LTX-2's sound: a log-mel spectrogram, a VAE of spectrograms, latents of the sound as tokens.

    mel      log max(1e-5, M |STFT(wave)|),  Hann windows of 1024 samples, M Slaney's triangles from 0 to half the rate
    tokens   (raw - mean) / std,  each holding all channels and all bands of one latent
    F frames at `fps` have  a = round(F / fps * latents a second)  latents, which stand for 4 a - 3 of the spectrogram's frames

The numbers are those of Lightricks' ltx-core (its AudioProcessor); diffusers has the networks and none of this.

Legend: B rows, K channels of the sound, S samples, T frames of the spectrogram, M bands, C channels of the latents, m their
bands, a latents, D = C m values of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import LATENT_DOWNSAMPLE_FACTOR as STEP
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from flowrun.flow.path import wide
from flowrun.graph import Unit
from flowrun.pipelines._precision import dtype_of
from flowrun.pipelines._targets import posterior
from flowrun.sound import Hearing

WINDOW = 1024  # samples
FLOOR = 1e-5


@dataclass(frozen=True, kw_only=True)
class Mel:
    """hop: samples from one frame to the next."""

    hearing: Hearing
    hop: int
    bands: int

    def latents(self, frames: int) -> int:
        """a, for so many frames of video."""
        return round(frames / self.hearing.fps * (self.hearing.rate / self.hop / float(STEP)))

    def frames_of(self, samples: int) -> int:
        """F, of the video that lasts as long as so many samples."""
        return round(samples / self.hearing.rate * self.hearing.fps)

    def spectrogram(self, wave: Tensor) -> Tensor:
        """[K, S] -> [K, 1 + S // hop, M], fp32, on the CPU."""
        rate = self.hearing.rate
        triangles = mel_filter_bank(1 + WINDOW // 2, self.bands, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
        found = [
            spectrogram(channel, window_function(WINDOW, "hann"), WINDOW, self.hop, power=1.0, mel_filters=triangles,
                        mel_floor=FLOOR, log_mel="log")
            for channel in wave.cpu().numpy()
        ]  # fmt: skip
        return torch.from_numpy(np.stack(found)).transpose(1, 2).contiguous()


def moments_unit(mel: Mel) -> Unit:
    """What the VAE says of a row's sound, in the transformer's units."""
    settings: Mapping[str, Any] = {"rate": mel.hearing.rate, "fps": mel.hearing.fps, "hop": mel.hop, "bands": mel.bands,
                                   "window": WINDOW, "floor": FLOOR}  # fmt: skip
    return Unit(
        name="audio_moments",
        input_params=("audio",),
        output_params=("audio_mean", "audio_std"),
        onload_model_names=("audio_vae",),
        process=partial(_moments, mel),
        settings=settings,
    )


def heard(audio_vae: nn.Module, vocoder: nn.Module, tokens: Tensor) -> Tensor:
    """Clean latents [B, a, D] -> [B, K, S], fp32 in [-1, 1]."""
    raw = wide(tokens) * wide(audio_vae.latents_std) + wide(audio_vae.latents_mean)
    bands = audio_vae.config.mel_bins // audio_vae.mel_compression_ratio
    latents = raw.unflatten(2, (-1, bands)).transpose(1, 2)  # [B, C, a, m]
    mel = audio_vae.decode(latents.to(dtype_of(audio_vae)), return_dict=False)[0]  # [B, K, T, M]
    return wide(vocoder(mel.to(dtype_of(vocoder)))).clamp(-1, 1)


def _moments(mel: Mel, ctx: Any, audio: Tensor) -> dict[str, Tensor]:
    """audio: [K, S] -> mean and standard deviation of its latents, [a, D] each, fp32."""
    vae = ctx.models["audio_vae"]
    frames = STEP * (mel.latents(mel.frames_of(audio.shape[1])) - 1) + 1  # as many as the decoder makes of these latents
    seen = mel.spectrogram(audio)[None, :, :frames].to(next(vae.parameters()))  # [1, K, T, M]
    mean, std = (wide(part[0].transpose(0, 1).flatten(1)) for part in posterior(vae, seen))  # [a, D]
    return {"audio_mean": (mean - wide(vae.latents_mean)) / wide(vae.latents_std), "audio_std": std / wide(vae.latents_std)}
