"""Identities of the straight path, in float64."""

import pytest
import torch

from flowrun.flow.path import clean_estimate, expand, mix, noise_estimate, velocity_target
from flowrun.flow.step import euler


@pytest.fixture
def parts():
    g = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(5, 3, 4, 2, dtype=torch.float64, generator=g) for _ in range(2))
    sigma = torch.tensor([0.0, 1.0, 0.25, 0.5, 0.9], dtype=torch.float64)
    return clean, noise, sigma


def test_the_path_starts_at_noise_and_ends_clean(parts):
    clean, noise, sigma = parts
    x = mix(clean, noise, sigma)
    assert torch.equal(x[0], clean[0])
    assert torch.equal(x[1], noise[1])
    assert torch.allclose(x[2], 0.75 * clean[2] + 0.25 * noise[2], rtol=0, atol=1e-15)


def test_the_velocity_is_the_derivative_of_the_path(parts):
    clean, noise, sigma = parts
    slope = torch.autograd.functional.jvp(lambda s: mix(clean, noise, s), sigma, torch.ones_like(sigma))[1]
    assert torch.allclose(velocity_target(clean, noise), slope, rtol=0, atol=1e-15)


def test_the_true_velocity_gives_back_clean_and_noise(parts):
    clean, noise, sigma = parts
    x, v = mix(clean, noise, sigma), velocity_target(clean, noise)
    assert torch.allclose(clean_estimate(x, v, sigma), clean, rtol=0, atol=1e-14)
    assert torch.allclose(noise_estimate(x, v, sigma), noise, rtol=0, atol=1e-14)


def test_estimates_of_any_velocity_mix_back_to_x(parts):
    clean, noise, sigma = parts
    x, v = clean, noise.sin()
    estimates = clean_estimate(x, v, sigma), noise_estimate(x, v, sigma)
    assert torch.allclose(mix(*estimates, sigma), x, rtol=0, atol=1e-14)
    assert torch.allclose(velocity_target(*estimates), v, rtol=0, atol=1e-14)


def test_one_euler_step_along_the_true_velocity_is_exact_from_any_level_to_any_other(parts):
    clean, noise, sigma = parts
    following = sigma.flip(0)
    step = euler(mix(clean, noise, sigma), velocity_target(clean, noise), sigma, following)
    assert torch.allclose(step, mix(clean, noise, following), rtol=0, atol=1e-14)


def test_a_zero_dimensional_sigma_means_every_row(parts):
    clean, noise, _ = parts
    assert torch.equal(mix(clean, noise, torch.tensor(0.3)), mix(clean, noise, torch.full((5,), 0.3)))


@pytest.mark.parametrize("shape", [(1,), (5, 1), (4,)])
def test_a_sigma_of_another_shape_is_refused_instead_of_broadcast(parts, shape):
    with pytest.raises(ValueError, match="one number per row"):
        expand(torch.zeros(shape), parts[0])


def test_rows_on_a_square_batch_are_not_mistaken_for_columns():
    """With x of shape [B, B] a sigma that is not widened would broadcast over the wrong axis without an error."""
    clean, noise, sigma = torch.zeros(3, 3), torch.ones(3, 3), torch.tensor([0.1, 0.5, 0.9])
    assert torch.equal(mix(clean, noise, sigma), sigma[:, None].expand(3, 3))


def test_half_precision_is_widened_before_the_arithmetic():
    clean, noise = torch.full((1, 2), 1.0, dtype=torch.bfloat16), torch.full((1, 2), 1.0078125, dtype=torch.bfloat16)
    x = mix(clean, noise, torch.tensor([0.5]))
    assert x.dtype == torch.float32
    assert x[0, 0] == 1.00390625  # bf16 cannot hold it
    assert velocity_target(clean, noise).dtype == torch.float32
    assert euler(clean, noise, torch.tensor(1.0), torch.tensor(0.5)).dtype == torch.float32
