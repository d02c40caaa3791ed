"""Sampling steps as Gaussian policies: against torch.distributions, closed forms in float64, and stated test vectors."""

import math

import pytest
import torch
from torch.distributions import Normal

from flowrun.flow.policy import Dynamics, LogProb, log_prob, mean_by_velocity, transition
from flowrun.flow.step import euler

NOISY = [(Dynamics.flow_sde, 0.7), (Dynamics.dance_sde, 0.3), (Dynamics.cps, 0.8)]
VECTORS = [  # dynamics, eta, std, factor of the noise estimate, d mean / d velocity; sigma 0.6 -> 0.5
    (Dynamics.flow_sde, 0.7, 0.271109, 0.438750, -0.124500),
    (Dynamics.dance_sde, 0.3, 0.094868, 0.492500, -0.103000),
    (Dynamics.cps, 0.8, 0.475528, 0.154508, -0.238197),
]


def wide(value):
    return torch.tensor(value, dtype=torch.float64)


def step(dynamics, eta, x, v, sigma=0.6, after=0.5, second=0.9):
    return transition(dynamics, eta, x, v, wide(sigma), wide(after), wide(second))


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dynamics, eta, std, of_noise, by_velocity", VECTORS)
def test_the_steps_have_their_stated_coefficients(dynamics, eta, std, of_noise, by_velocity):
    sigma, one = 0.6, torch.ones(1, 3, dtype=torch.float64)
    assert float(step(dynamics, eta, one, one).std) == pytest.approx(std, abs=1e-6)
    # clean = x - sigma v and noise = x + (1 - sigma) v: choose them 0 and 1, then 1 and 0
    assert float(step(dynamics, eta, sigma * one, one).mean[0, 0]) == pytest.approx(of_noise, abs=1e-6)
    assert float(step(dynamics, eta, (1 - sigma) * one, -one).mean[0, 0]) == pytest.approx(0.5, abs=1e-12)  # 1 - 0.5
    assert float(mean_by_velocity(dynamics, eta, wide(sigma), wide(0.5), wide(0.9))) == pytest.approx(by_velocity, abs=1e-6)


@pytest.mark.parametrize("dynamics", list(Dynamics))
def test_without_noise_every_step_is_eulers(dynamics):
    x, v = draws(2, 5), draws(2, 5, seed=1)
    taken = step(dynamics, 0.0, x, v)
    assert torch.equal(taken.mean, euler(x, v, wide(0.6), wide(0.5))) and float(taken.std) == 0
    near = step(dynamics, 1e-7, x, v)
    assert (near.mean - taken.mean).abs().max() < 1e-12


@pytest.mark.parametrize("after", [0.9, 0.75, 0.5])
def test_the_first_flow_sde_step_injects_eta_whatever_the_schedule(after):
    x, v = draws(1, 4), draws(1, 4, seed=1)
    taken = step(Dynamics.flow_sde, 0.7, x, v, sigma=1.0, after=after, second=after)
    assert float(taken.std) == pytest.approx(0.7, abs=1e-12)
    noise = x  # at sigma 1 the noise estimate is x itself
    expected = (1 - after) * (x - v) + (after - 0.7**2 / 2) * noise
    assert (taken.mean - expected).abs().max() < 1e-12


def test_cps_keeps_the_paths_coefficients():
    for sigma, after in ((1.0, 0.9), (0.6, 0.5), (0.2, 0.05)):
        one = torch.ones(1, 1, dtype=torch.float64)
        taken = step(Dynamics.cps, 0.8, sigma * one, one, sigma, after)  # clean 0, noise 1
        assert float(taken.mean) ** 2 + float(taken.std) ** 2 == pytest.approx(after**2, abs=1e-12)


@pytest.mark.parametrize("dynamics, eta", NOISY)
def test_log_probabilities_are_those_of_the_gaussian(dynamics, eta):
    x, v, after = draws(3, 2, 4), draws(3, 2, 4, seed=1), draws(3, 2, 4, seed=2)
    taken = step(dynamics, eta, x, v)
    expected = Normal(taken.mean, taken.std).log_prob(after).flatten(1).mean(1)
    assert (log_prob(after, taken) - expected).abs().max() < 1e-12
    squares = (after - taken.mean).square().flatten(1).mean(1)
    assert torch.equal(log_prob(after, taken, LogProb.unnormalized), -squares)


def test_the_log_probability_of_the_mean_and_its_expectation():
    x, v = torch.zeros(1, 200_000, dtype=torch.float64), torch.zeros(1, 200_000, dtype=torch.float64)
    taken = step(Dynamics.flow_sde, 0.7, x, v)
    assert float(log_prob(taken.mean, taken)) == pytest.approx(0.386296, abs=1e-6)
    sampled = taken.mean + taken.std * draws(1, 200_000)
    assert float(log_prob(sampled, taken)) == pytest.approx(-0.113704, abs=5 * math.sqrt(0.5 / 200_000))


def test_the_unnormalised_form_scales_the_log_ratio_by_twice_the_variance():
    x, v, other, after = (draws(2, 6, seed=seed) for seed in range(4))
    one, two = step(Dynamics.cps, 0.8, x, v), step(Dynamics.cps, 0.8, x, other)
    plain = log_prob(after, one) - log_prob(after, two)
    own = log_prob(after, one, LogProb.unnormalized) - log_prob(after, two, LogProb.unnormalized)
    assert (own - 2 * one.std.square() * plain).abs().max() < 1e-12


@pytest.mark.parametrize("dynamics, eta", NOISY)
def test_the_distance_of_means_is_that_of_velocities_times_a_factor(dynamics, eta):
    x, v, other = (draws(4, 3, seed=seed) for seed in range(3))
    means = (step(dynamics, eta, x, v).mean - step(dynamics, eta, x, other).mean).square().mean()
    factor = mean_by_velocity(dynamics, eta, wide(0.6), wide(0.5), wide(0.9))
    assert float(means) == pytest.approx(float(factor.square() * (v - other).square().mean()), rel=1e-10)


def test_a_step_without_noise_has_no_log_probability():
    x = draws(1, 3)
    with pytest.raises(ValueError, match="no noise"):
        log_prob(x, step(Dynamics.ode, 0.0, x, x))


def generated_variance(dynamics, eta, steps, shift=3.0, variance=0.30):
    """Of samples along the exact velocity of a Gaussian with that variance, the last step Euler's: each step is linear, so that
    x_next = a x + std n, and the variance goes from one to the next as a^2 variance + std^2."""
    levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    levels, x, found = shift * levels / (1 + (shift - 1) * levels), torch.ones(1, 1, dtype=torch.float64), 1.0
    for i in range(steps):
        sigma, after = levels[i], levels[i + 1]
        v = ((sigma - (1 - sigma) * variance) / ((1 - sigma) ** 2 * variance + sigma**2)) * x  # E[noise - clean | x]
        taken = transition(Dynamics.ode if i == steps - 1 else dynamics, eta, x, v, sigma, after, levels[1])
        found = float(taken.mean) ** 2 * found + float(taken.std) ** 2
    return found


@pytest.mark.parametrize(
    "dynamics, eta, expected",
    [
        (Dynamics.ode, 0.0, (0.172, 0.228, 0.269)),
        (Dynamics.flow_sde, 0.7, (0.216, 0.256, 0.282)),
        (Dynamics.dance_sde, 0.3, (0.178, 0.233, 0.272)),
        (Dynamics.cps, 0.7, (0.134, 0.164, 0.190)),
    ],
)
def test_each_dynamics_keeps_as_much_variance_as_is_known_of_it(dynamics, eta, expected):
    for steps, wanted in zip((10, 20, 50), expected, strict=True):  # found by sampling, to three digits
        assert generated_variance(dynamics, eta, steps) == pytest.approx(wanted, abs=0.0021)
