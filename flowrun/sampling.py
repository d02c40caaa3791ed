"""From noise to pictures along the learned flow, with classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598).

A picture may be a video: latents then have a dimension more, f frames behind their channels.

Legend: B rows, C h w latent channels, height and width, F H W frames, height and width in pixels, T solver steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowrun.feature_cache import FeatureCache
from flowrun.feed import collate
from flowrun.flow.step import solve
from flowrun.graph import seed_of
from flowrun.guided import Guided
from flowrun.pipelines import Pipeline, Shape
from flowrun.sound import Wave

CHUNK = 64  # pictures denoised at once
FPS = 16.0  # frames a second at which videos without a sound are shown


@dataclass(frozen=True, kw_only=True)
class Picture:
    """image: [3, H, W], or [F, 3, H, W] of a video, fp32 in [-1, 1], on the CPU. seen: pictures or videos that it was made
    from, uint8 of such shapes. sound: of a video, which is then shown at fps frames a second."""

    prompt: str
    seed: int
    image: Tensor
    seen: Sequence[Tensor] = ()
    sound: Wave | None = None
    fps: float = FPS


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Where some walks began and where they ended: [B, C, (f,) h, w] each, on the network's device."""

    noise: Tensor
    latents: Tensor


def pictures(pipeline: Pipeline, encoded: Mapping[str, Mapping[str, Tensor]], prompts: Sequence[str],
             seeds: Sequence[int], shape: Shape, steps: int, guidance: float) -> list[Picture]:  # fmt: skip
    """One picture per seed and prompt, seeds outermost.

    encoded: prompt -> the pipeline's conditions of one row; with guidance other than 1 also of the empty prompt, the
    negative one. shape: of all pictures, in pixels. A picture's noise comes from its seed and prompt alone, whatever
    else is drawn with it. Raises KeyError for a prompt that is not encoded."""
    wanted = [(prompt, seed) for seed in seeds for prompt in prompts]
    drawn = walks(pipeline, encoded, wanted, shape, steps, guidance)
    made = [one for walk in drawn for one in zip(pipeline.decode(walk.latents).cpu(), pipeline.sounds(walk.latents), strict=True)]
    fps = FPS if pipeline.sound is None else pipeline.sound.fps
    return [Picture(prompt=p, seed=s, image=image, sound=sound, fps=fps)
            for (p, s), (image, sound) in zip(wanted, made, strict=True)]  # fmt: skip


def walks(pipeline: Pipeline, encoded: Mapping[str, Mapping[str, Tensor]], wanted: Sequence[tuple[str, int]],
          shape: Shape, steps: int, guidance: float) -> Iterator[Walk]:  # fmt: skip
    """Denoise each (prompt, seed) of `wanted`, some at a time and in order; the rest is as for `pictures`."""
    sigmas = pipeline.schedule(steps, shape)
    device = next(pipeline.models[pipeline.denoiser].parameters()).device
    for start in range(0, len(wanted), CHUNK):
        chunk = wanted[start : start + CHUNK]
        conditions = _stack(pipeline, [encoded[prompt] for prompt, _ in chunk], device)
        negative = _stack(pipeline, [encoded[""]] * len(chunk), device) if guidance != 1 else None
        noise = torch.stack([_noise(pipeline, prompt, seed, shape) for prompt, seed in chunk]).to(device)  # [B, C, (f,) h, w]
        yield Walk(noise=noise, latents=denoise(pipeline, conditions, negative, noise, sigmas, guidance))


def denoise(pipeline: Pipeline, conditions: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None, noise: Tensor,
            sigmas: Tensor, guidance: float, progress: Callable[[], None] | None = None) -> Tensor:  # fmt: skip
    """Walk the T + 1 levels `sigmas` downward by Euler steps: noise [B, C, (f,) h, w] -> clean latents, fp32.

    conditions, negative: name -> [B, ...]; negative is used unless guidance is 1, in one call of 2 B rows with the
    conditions, or in one of its own where a feature cache wants that. progress is called after each velocity. No
    gradients; the networks are in evaluation mode meanwhile."""
    networks, sigmas = [pipeline.models[name] for name in pipeline.denoisers], sigmas.to(noise.device)
    cache = FeatureCache(*networks)

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        v = guided(x, sigma)
        if progress is not None:
            progress()
        return v

    with torch.no_grad(), evaluating(*networks), cache.walk(len(sigmas) - 1):
        guided = Guided(pipeline, conditions, negative, noise, sigmas[:-1], guidance, cache)
        return solve(velocity, pipeline.start(noise, sigmas), sigmas)


@contextmanager
def evaluating(*networks: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; afterwards every module is in the mode it was in."""
    before = [(module, module.training) for network in networks for module in network.modules()]
    try:
        for network in networks:
            network.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def _noise(pipeline: Pipeline, prompt: str, seed: int, shape: Shape) -> Tensor:
    """[C, (f,) h, w], drawn on the CPU: the same on every device."""
    return pipeline.noise(shape, torch.Generator().manual_seed(seed_of("sample", seed, prompt)))


def _stack(pipeline: Pipeline, rows: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    return collate(rows, pipeline.conditions, pipeline.ragged, [""] * len(rows), device)
