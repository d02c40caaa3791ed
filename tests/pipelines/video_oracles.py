"""What diffusers' Wan pipelines say, in flowrun's terms: one oracle for each family of videos. LTX-2's are in ltx2_oracles.py.

Wan's solver is replaced by Euler's with the same shift: the same equation at the same levels as ours.

Legend: B rows, C channels, f h w latent frames, height and width, F H W frames, height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline
from PIL import Image
from torch import Tensor

from flowrun.graph import Draws, Executor, State, UnitGraph
from flowrun.pipelines._diffusers import DiffusersPipeline
from tests.pipelines.families import CPU, make
from tests.pipelines.ltx2_oracles import LTX2FromImage, LTX2Oracle

SHAPE, PROMPTS = (5, 32, 32), ["a red apple", "a very small cat on top of a large house", ""]


class WanOracle:
    """whole: diffusers' pipeline of the networks, tokenizers and settings of `ours`."""

    cls: ClassVar[type[DiffusionPipeline]] = WanPipeline
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, ours: DiffusersPipeline) -> None:
        parts = {name: ours.weights.part(name) for name in ours.names.parts}
        parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=parts["scheduler"].config.flow_shift)
        self.ours, self.tokens = ours, ours.config.max_sequence_length
        self.whole = self.cls(**{"transformer_2": None, **ours.models, **parts, **self.settings})
        self.whole.set_progress_bar_config(disable=True)

    def embeddings(self, prompts: Sequence[str]) -> Tensor:
        return self.whole.encode_prompt(list(prompts), do_classifier_free_guidance=False, max_sequence_length=self.tokens)[0]

    def sampled(self, noise: Tensor, prompts: Sequence[str], videos: Sequence[Tensor], steps: int, guidance: float) -> Tensor:
        """Videos [B, F, 3, H, W] in [0, 1] from noise [B, C, f, h, w], each row alone."""
        rows = zip(noise.split(1), prompts, videos, strict=True)
        return torch.cat([self._row(latents, prompt, video, steps, guidance) for latents, prompt, video in rows])

    def _row(self, latents: Tensor, prompt: str, video: Tensor, steps: int, guidance: float) -> Tensor:
        frames, _, height, width = video.shape
        given = {"prompt": prompt, "negative_prompt": "", "height": height, "width": width, "num_frames": frames,
                 "num_inference_steps": steps, "guidance_scale": guidance, "latents": latents, "output_type": "pt",
                 "max_sequence_length": self.tokens, **self.said(video)}  # fmt: skip
        return self.whole(**given).frames

    def said(self, video: Tensor) -> dict[str, Any]:
        return {}

    def posterior(self, video: Tensor) -> Any:
        """Of the VAE, for uint8 [F, 3, H, W]."""
        return self.whole.vae.encode(self.whole.video_processor.preprocess_video(video[None] / 255)).latent_dist

    def latents(self, raw: Tensor) -> Tensor:
        """The VAE's sample or mean of a video, [1, ...] -> the network's [C, f, h, w]."""
        mean, std = self._statistics()
        return ((raw - mean) / std)[0]

    def decoded(self, latents: Tensor) -> Tensor:
        """[B, C, f, h, w] -> videos [B, F, 3, H, W] in [-1, 1]."""
        mean, std = self._statistics()
        return self.whole.vae.decode(latents * std + mean).sample.clamp(-1, 1).transpose(1, 2)

    def _statistics(self) -> list[Tensor]:
        return [torch.tensor(self.whole.vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std")]


class Experts(WanOracle):
    settings = {"boundary_ratio": 0.875}

    def said(self, video: Tensor) -> dict[str, Any]:
        return {**super().said(video), "guidance_scale_2": 3.0}


class TokenTimes(WanOracle):
    settings = {"expand_timesteps": True}


class FromImage(WanOracle):
    cls = WanImageToVideoPipeline

    def said(self, video: Tensor) -> dict[str, Any]:
        return {**super().said(video), "image": first_frame(video)}

    def condition(self, video: Tensor) -> Tensor:
        """What stands beside the noise in the network's input, [C or C + t, f, h, w]."""
        frames, _, height, width = video.shape
        image = self.whole.video_processor.preprocess(first_frame(video), height=height, width=width)
        return self.whole.prepare_latents(image, 1, self.whole.vae.config.z_dim, height, width, frames, torch.float32, CPU)[1][0]


class ExpertsFromImage(FromImage, Experts):
    settings = {"boundary_ratio": 0.9}


class TokenTimesFromImage(FromImage):
    settings = {"expand_timesteps": True}


WANS: dict[str, type[WanOracle]] = {
    "wan": WanOracle, "wan_i2v": FromImage, "wan2_2": Experts, "wan2_2_i2v": ExpertsFromImage,
    "wan2_2_5b": TokenTimes, "wan2_2_5b_i2v": TokenTimesFromImage,
}  # fmt: skip
WITH_SOUND: dict[str, type[LTX2Oracle]] = {"ltx2": LTX2Oracle, "ltx2_i2v": LTX2FromImage}
ORACLES: dict[str, type[WanOracle | LTX2Oracle]] = {**WANS, **WITH_SOUND}
FAMILIES = tuple(ORACLES)
TWO_EXPERTS = ("wan2_2", "wan2_2_i2v")
FROM_IMAGE = tuple(family for family, cls in ORACLES.items() if issubclass(cls, FromImage | LTX2FromImage))


@cache
def loaded(family: str) -> DiffusersPipeline:
    """With all weights; tests do not change it."""
    return anew(family)


def anew(family: str, *overrides: str) -> DiffusersPipeline:
    pipeline = make(family, *overrides)
    pipeline.load(pipeline.components(), CPU, torch.float32)
    return pipeline


@cache
def oracle(family: str) -> WanOracle | LTX2Oracle:
    return ORACLES[family](loaded(family))


def first_frame(video: Tensor) -> Image.Image:
    return Image.fromarray(video[0].permute(1, 2, 0).numpy())


def clip(seed: int = 0, shape: tuple[int, int, int] = SHAPE) -> Tensor:
    """Random pixels, uint8 [F, 3, H, W]."""
    frames, height, width = shape
    return torch.randint(0, 256, (frames, 3, height, width), generator=torch.Generator().manual_seed(seed)).byte()


def tone(seed: int = 0, frames: int = SHAPE[0], fps: float = 24.0, rate: int = 16000) -> Tensor:
    """The sound of a clip: two sines, one on each side, [2, S] in [-1, 1]."""
    time = torch.arange(round(frames / fps * rate)) / rate
    return torch.stack([torch.sin(2 * torch.pi * 200.0 * (seed + side) * time) / (1 + side) for side in (1, 2)])


def encoded(pipeline: DiffusersPipeline, prompts: Sequence[str], videos: Sequence[Tensor]) -> dict[str, Tensor]:
    """The conditions of each row, encoded alone: name -> [B, ...]."""
    units = pipeline.units()
    units = [units[i] for i in sorted(UnitGraph(units).needed_for([("shared", name) for name in pipeline.conditions]))]
    rows = zip(prompts, videos, strict=True)
    jobs = [(State(shared={"prompt": prompt, "video": video}), Draws(0, prompt, 0), {}) for prompt, video in rows]
    states = Executor(units, pipeline.models).run_batch(jobs)
    return {name: torch.stack([state.shared[name] for state in states]) for name in pipeline.conditions}
