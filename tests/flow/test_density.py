"""Training densities against torch.distributions and closed-form moments; weightings against integrals and diffusers.

The Kolmogorov distance of n draws exceeds 1.95 / sqrt(n) with probability 0.001; the seeds are fixed, so a test that
passes keeps passing. Each control has a distance far above the bound.
"""

import math

import pytest
import torch
from torch.distributions import AffineTransform, Normal, SigmoidTransform, TransformedDistribution

from flowrun.flow.density import Density, Weighting, draw, weight

ROWS = 20_000
BOUND = 1.95 / math.sqrt(ROWS)


def sample(density, mean=0.0, std=1.0, shift=1.0, seed=0):
    return draw(density, mean, std, shift, ROWS, torch.Generator().manual_seed(seed))


def distance(draws, cdf):
    """Largest gap between the draws' empirical distribution and `cdf`."""
    x = draws.double().sort().values
    steps = torch.arange(ROWS + 1, dtype=torch.float64) / ROWS
    return float(torch.maximum((cdf(x) - steps[:-1]).abs(), (cdf(x) - steps[1:]).abs()).max())


def logit_normal(mean, std):
    return TransformedDistribution(
        Normal(torch.tensor(0.0, dtype=torch.float64), 1.0), [AffineTransform(mean, std), SigmoidTransform()]
    ).cdf


def test_uniform_draws_are_uniform_and_never_zero():
    draws = sample(Density.uniform)
    assert distance(draws, lambda s: s) < BOUND
    assert draws.dtype == torch.float32 and draws.min() > 0 and draws.max() <= 1
    assert distance(draws, lambda s: s**1.1) > 2 * BOUND


def test_a_uniform_draw_of_zero_becomes_one(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.zeros(*size))
    assert torch.equal(draw(Density.uniform, 0.0, 1.0, 3.0, 2, torch.Generator()), torch.ones(2))


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (-0.5, 1.2), (1.0, 0.5)])
def test_logit_normal_draws_follow_the_distribution(mean, std):
    draws = sample(Density.logit_normal, mean, std)
    assert distance(draws, logit_normal(mean, std)) < BOUND
    assert distance(draws, logit_normal(mean + 0.1 * std, std)) > 2 * BOUND


@pytest.mark.parametrize("shift", [0.5, 3.0])
def test_shifting_a_logit_normal_adds_the_logarithm_to_its_mean(shift):
    draws = sample(Density.logit_normal, 0.2, 0.9, shift)
    assert distance(draws, logit_normal(0.2 + math.log(shift), 0.9)) < BOUND
    assert distance(draws, logit_normal(0.2, 0.9)) > 2 * BOUND


def test_shift_three_moves_uniform_draws_toward_noise():
    """sigma' = 3u/(1+2u): P(sigma' <= x) = x/(3-2x), mean 3/2 - 3 ln 3 / 4 = 0.676."""
    draws = sample(Density.uniform, shift=3.0)
    assert distance(draws, lambda s: s / (3 - 2 * s)) < BOUND
    assert float(draws.mean()) == pytest.approx(1.5 - 0.75 * math.log(3), abs=0.006)


@pytest.mark.parametrize("least, greatest", [(0.875, 1.0), (0.0, 0.875), (0.2, 0.4)])
@pytest.mark.parametrize("density, mean, std, shift", [
    (Density.uniform, 0.0, 1.0, 1.0), (Density.uniform, 0.0, 1.0, 3.0), (Density.logit_normal, 0.0, 1.0, 1.0),
    (Density.logit_normal, -0.5, 1.2, 3.0),
])  # fmt: skip
def test_draws_within_a_range_are_those_of_the_whole_density_that_lie_there(density, mean, std, shift, least, greatest):
    """P(sigma' <= x | range) = (P(x) - P(least)) / (P(greatest) - P(least)), with P in closed form."""

    def whole(s):
        s = torch.as_tensor(s, dtype=torch.float64).clamp(0, 1)
        if density is Density.uniform:
            return s / (shift + (1 - shift) * s)
        return logit_normal(mean + math.log(shift), std)(s.clamp(1e-12, 1 - 1e-12))

    draws = draw(density, mean, std, shift, ROWS, torch.Generator().manual_seed(0), least, greatest)
    share = whole(greatest) - whole(least)
    assert distance(draws, lambda s: (whole(s) - whole(least)) / share) < BOUND
    assert draws.min() >= least and draws.max() <= greatest and draws.dtype == torch.float32 and draws.min() > 0
    everything = draw(density, mean, std, shift, ROWS, torch.Generator().manual_seed(1))
    kept = everything[(everything >= least) & (everything <= greatest)]  # by rejection
    assert abs(float(draws.mean() - kept.mean())) < 4 * float(kept.std()) * (len(kept) ** -0.5 + ROWS**-0.5)
    assert abs(len(kept) / ROWS - float(share)) < 4 / math.sqrt(ROWS)


@pytest.mark.parametrize("mean, least, greatest", [(-12.0, 0.9, 1.0), (12.0, 0.0, 0.1)])
def test_a_range_far_out_in_a_densitys_tail_is_drawn_from_all_the_same(mean, least, greatest):
    draws = draw(Density.logit_normal, mean, 1.0, 1.0, 1000, torch.Generator().manual_seed(0), least, greatest)
    assert draws.isfinite().all() and draws.min() >= least and draws.max() <= greatest and len(draws.unique()) > 900
    near = draws > 0.9 if mean < 0 else draws < 0.1
    assert near.double().mean() > 0.9  # the tail falls so fast that nearly all lie at the near end


def test_draws_depend_on_the_generator_alone():
    torch.manual_seed(1)
    a = sample(Density.logit_normal, seed=5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(a, sample(Density.logit_normal, seed=5))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(a, sample(Density.logit_normal, seed=6))


@pytest.mark.parametrize("weighting", list(Weighting))
def test_weights_are_those_of_diffusers(weighting):
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    sigma = torch.linspace(0.01, 1, 50)
    assert torch.allclose(weight(weighting, sigma), compute_loss_weighting_for_sd3(weighting.value, sigma), rtol=1e-6)


def test_cosmap_has_mean_one_under_uniform_sigma():
    """Integral over [0, 1] of 2 / (pi (1 - 2 s + 2 s^2)) is 1: as a density it is a proper one."""
    s = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    assert float(weight(Weighting.cosmap, s).mean()) == pytest.approx(1, abs=1e-8)
