"""Noise levels against closed forms and published values."""

import itertools
import math

import pytest
import torch

from flowrun.flow.path import mix, velocity_target
from flowrun.flow.schedule import shifted, sigmas
from flowrun.flow.step import euler

LINE = torch.linspace(0, 1, 101, dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize("shift", [0.3, 1.0, 3.0])
def test_levels_go_from_one_to_zero_strictly_down(steps, shift):
    levels = sigmas(steps, shift)
    assert levels.shape == (steps + 1,) and levels.dtype == torch.float32
    assert levels[0] == 1 and levels[-1] == 0
    assert (levels.diff() < 0).all()


def test_without_shift_levels_are_even():
    assert torch.equal(sigmas(4, 1.0), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]))


def test_shift_three_at_four_steps():
    """3 s / (1 + 2 s) by hand: 0.75 -> 2.25 / 2.5, 0.5 -> 1.5 / 2, 0.25 -> 0.75 / 1.5."""
    assert torch.allclose(sigmas(4, 3.0), torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]), rtol=0, atol=1e-7)


def test_shift_is_the_exponential_shift_of_flux_with_mu_its_logarithm():
    """e^mu / (e^mu + 1/sigma - 1); mu = 1.15 takes 0.5 to 0.7595."""
    mu = 1.15
    inner = LINE[1:]
    assert torch.allclose(
        shifted(inner, math.exp(mu)), math.exp(mu) / (math.exp(mu) + 1 / inner - 1), rtol=1e-12, atol=0
    )
    assert round(float(shifted(torch.tensor(0.5), math.exp(mu))), 4) == 0.7595


def test_shifts_compose_by_product_and_are_undone_by_the_inverse():
    assert torch.allclose(shifted(shifted(LINE, 3.0), 2.0), shifted(LINE, 6.0), rtol=0, atol=1e-15)
    assert torch.allclose(shifted(shifted(LINE, 3.0), 1 / 3), LINE, rtol=0, atol=1e-15)
    assert torch.equal(shifted(LINE, 1.0), LINE)


@pytest.mark.parametrize("steps", [1, 3, 16])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_constant_velocity_lands_on_clean(steps, shift):
    g = torch.Generator().manual_seed(1)
    clean, x = (torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=g) for _ in range(2))
    velocity = velocity_target(clean, x)
    levels = sigmas(steps, shift).double()
    for sigma, following in itertools.pairwise(levels):
        x = euler(x, velocity, sigma, following)
    assert torch.allclose(x, clean, rtol=0, atol=1e-14)


def test_euler_converges_with_first_order_on_a_known_solution():
    """dx/dsigma = x from x(1) = e has x(0) = 1; halving the steps' length halves the error."""
    errors = []
    for steps in (64, 128):
        x, levels = torch.full((1, 1), math.e, dtype=torch.float64), sigmas(steps, 1.0).double()
        for sigma, following in itertools.pairwise(levels):
            x = euler(x, x, sigma, following)
        errors.append(abs(float(x) - 1))
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.02)


def test_euler_is_what_diffusers_steps():
    from diffusers import FlowMatchEulerDiscreteScheduler

    theirs = FlowMatchEulerDiscreteScheduler(shift=1.0)
    theirs.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    g = torch.Generator().manual_seed(2)
    clean, noise = (torch.randn(1, 2, 3, 3, generator=g) for _ in range(2))
    a = b = mix(clean, noise, torch.ones(1))
    levels = sigmas(4, 1.0)
    assert torch.equal(levels, theirs.sigmas)
    for i, t in enumerate(theirs.timesteps):
        velocity = (a * levels[i]).sin()
        a, b = euler(a, velocity, levels[i], levels[i + 1]), theirs.step(velocity, t, b).prev_sample
        assert torch.allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps, shift", [(0, 1.0), (4, 0.0), (4, -1.0), (4, float("nan"))])
def test_impossible_schedules_are_refused(steps, shift):
    with pytest.raises(ValueError):
        sigmas(steps, shift)
