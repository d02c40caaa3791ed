"""Stable Diffusion XL trains on its own target.   pytest tests/pipelines/test_sdxl.py"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from torch.nn.functional import mse_loss

from flowrun.algorithms.sft import Sft
from flowrun.config import ConfigError
from flowrun.pipelines.sdxl import StableDiffusionXL
from flowrun.registry import ALGORITHMS
from tests.pipelines.families import PROMPTS, encoded, loaded, make, normal

UNIFORM: dict[str, Any] = {"density": "uniform", "density_mean": 0.0, "density_std": 1.0, "shift": 1.0, "weighting": "none",
                           "caption_dropout": 0.0, "mask": False}  # fmt: skip


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_loss_is_the_error_of_what_the_network_predicts_at_uniform_times(prediction: str) -> None:
    """As diffusers' training script has it, from the same noise and the same times."""
    pipeline = make("sdxl", f"model.components.scheduler.prediction_type={prediction}")
    assert isinstance(pipeline, StableDiffusionXL)
    pipeline.models = loaded("sdxl").models
    clean, conditions = normal(3, 4, 8, 8, seed=5), encoded(pipeline, PROMPTS)
    algorithm = Sft(ALGORITHMS.build("task", Sft, UNIFORM))
    with torch.no_grad():
        out = algorithm.loss(pipeline, {**conditions, "target_latents": clean}, torch.Generator().manual_seed(7))

    again = torch.Generator().manual_seed(7)
    times = ((1 - torch.rand(3, generator=again)) * 1000).ceil().long() - 1
    noise = torch.randn(clean.shape, generator=again)
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction)
    noisy = scheduler.add_noise(clean, noise, times)
    told = {"text_embeds": conditions["pooled_prompt_embeds"], "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 3)}
    with torch.no_grad():
        found = pipeline.models["unet"](noisy, times, conditions["prompt_embeds"], added_cond_kwargs=told).sample
    target = noise if prediction == "epsilon" else scheduler.get_velocity(clean, noise, times)
    torch.testing.assert_close(out.loss, mse_loss(found, target), atol=1e-5, rtol=1e-4)
    assert len(set(times.tolist())) == 3


def test_another_prediction_is_refused() -> None:
    with pytest.raises(ConfigError, match="scheduler.prediction_type: is sample; known: epsilon, v_prediction"):
        make("sdxl", "model.components.scheduler.prediction_type=sample")


def test_sides_must_divide_by_what_the_unet_halves() -> None:
    with pytest.raises(ConfigError, match="a picture of 64x72 pixels does not divide into tiles of 16x16"):
        make("sdxl").latent_shape((64, 72))
