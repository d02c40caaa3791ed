"""The variance-preserving diffusion as a flow, against diffusers' schedulers.   pytest tests/flow/test_diffusion.py"""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler
from torch import Tensor

from flowrun.flow import diffusion
from flowrun.flow.path import mix
from flowrun.flow.step import solve

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
TIMES = torch.tensor([0, 1, 250, 500, 998, 999])


@pytest.fixture(scope="module")
def ddpm() -> DDPMScheduler:
    return DDPMScheduler(**BETAS)


@pytest.fixture(scope="module")
def times(ddpm: DDPMScheduler) -> diffusion.Times:
    return diffusion.Times(ddpm.alphas_cumprod)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_point_of_the_path_is_the_noisy_picture_in_other_units(ddpm: DDPMScheduler, times: diffusion.Times) -> None:
    clean, noise, sigma = normal(6, 3, 2, 2), normal(6, 3, 2, 2, seed=1), times.sigmas[TIMES]
    noisy = mix(clean, noise, sigma) / diffusion.scale(sigma, clean)
    torch.testing.assert_close(noisy, ddpm.add_noise(clean, noise, TIMES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_true_prediction_is_the_true_velocity(ddpm: DDPMScheduler, times: diffusion.Times, prediction: str) -> None:
    clean, noise, sigma = normal(6, 3, 2, 2), normal(6, 3, 2, 2, seed=1), times.sigmas[TIMES]
    x = mix(clean, noise, sigma)
    if prediction == "epsilon":
        found = diffusion.velocity_of_epsilon(x, noise, sigma)
    else:
        found = diffusion.velocity_of_v(x, ddpm.get_velocity(clean, noise, TIMES), sigma)
    torch.testing.assert_close(found, noise - clean, atol=1e-3, rtol=1e-4)


def test_times_and_levels_undo_each_other_and_equal_shares_are_equal_times(times: diffusion.Times) -> None:
    every = torch.arange(1000)
    torch.testing.assert_close(times.time(times.sigmas), every.float(), atol=2e-3, rtol=0)
    for place in (0.01, 0.5, 0.99):
        assert torch.equal(times.level((every + place) / 1000), times.sigmas)
    assert torch.equal(times.level(torch.tensor([1.0])), times.sigmas[-1:])
    between = (times.sigmas[300:301].double() + times.sigmas[301:302].double()) / 2
    assert 300.4 < float(times.time(between.float())) < 300.6


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_euler_steps_are_those_of_the_diffusions_samplers(times: diffusion.Times, prediction: str) -> None:
    """A made-up network; DDIM in its own units and Euler's method in b / a end at the same picture."""

    def network(z: Tensor, t: float) -> Tensor:
        return torch.tanh(0.7 * z + t / 1000)

    noise = normal(2, 3, 4, 4).float()
    euler = EulerDiscreteScheduler(**BETAS, prediction_type=prediction, timestep_spacing="leading", steps_offset=1)
    euler.set_timesteps(8)
    latents = noise * euler.init_noise_sigma
    for t in euler.timesteps:
        latents = euler.step(network(euler.scale_model_input(latents, t), float(t)), t, latents).prev_sample
    ratios = euler.sigmas.double()
    sigmas = (ratios / (1 + ratios)).float()
    of = diffusion.velocity_of_epsilon if prediction == "epsilon" else diffusion.velocity_of_v

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        rows = sigma.expand(len(x))
        return of(x, network(x / diffusion.scale(rows, x), float(times.time(rows)[0])), rows)

    ours = solve(velocity, noise * diffusion.scale(sigmas[0], noise), sigmas)
    torch.testing.assert_close(ours, latents, atol=1e-4, rtol=1e-4)
    ddim = DDIMScheduler(**BETAS, prediction_type=prediction, timestep_spacing="leading", steps_offset=1, clip_sample=False,
                         set_alpha_to_one=True)  # fmt: skip
    ddim.set_timesteps(8)
    z = noise
    for t in ddim.timesteps:
        z = ddim.step(network(z, float(t)), t, z).prev_sample
    torch.testing.assert_close(ours, z, atol=1e-4, rtol=1e-4)
