"""Importance weights: against their sums written out, and closed forms of log-normal weights."""

import math

import pytest
import torch

from flowrun.flow.importance import Weighting, effective, power_for


def log_normal(variance, n=200_000):
    """log(p / q) between Gaussians that far apart, by draws of q: N(-variance / 2, variance)."""
    z = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return math.sqrt(variance) * z - variance / 2


@pytest.mark.parametrize("power, most", [(1.0, None), (1.0, 1.5), (0.5, None), (0.3, 0.9)])
def test_weights_and_their_worth_are_the_sums_written_out(power, most):
    ratio = torch.tensor([0.2, 1.0, 1.7, 4.0], dtype=torch.float64)
    uncut = [float(r) ** power for r in ratio]
    w = [min(u, most or math.inf) for u in uncut]
    made = Weighting(power, most)
    assert made.logs(ratio.log()).exp().tolist() == pytest.approx(w)
    worth = made.worth(ratio.log())
    assert worth.ess == pytest.approx(sum(w) ** 2 / sum(x * x for x in w) / 4)
    assert worth.mean == pytest.approx(sum(w) / 4)
    assert worth.truncated == sum(u > x for u, x in zip(uncut, w, strict=True)) / 4
    assert worth.lost == pytest.approx(1 - sum(w) / sum(uncut), abs=1e-15)


def test_equal_weights_are_all_effective_and_one_that_has_everything_is_one_of_n():
    assert effective(torch.full((7,), -3.0)) == pytest.approx(1)
    assert effective(torch.tensor([0.0, -900.0, -900.0, -900.0])) == pytest.approx(1 / 4)


@pytest.mark.parametrize("far", [-5000.0, 5000.0])
def test_weights_too_small_or_large_for_a_float_keep_their_share(far):
    assert effective(torch.tensor([0.0, math.log(3)]) + far) == pytest.approx(16 / 10 / 2, abs=1e-3)
    assert float(Weighting(1.0, 2.0).logs(torch.tensor(5000.0)).exp()) == pytest.approx(2)


@pytest.mark.parametrize("variance", [0.1, 0.5, 1.0])
def test_of_log_normal_weights_exp_of_minus_the_variance_is_effective(variance):
    worth = Weighting(1.0, None).worth(log_normal(variance))
    assert worth.ess == pytest.approx(math.exp(-variance), rel=0.05)
    assert worth.mean == pytest.approx(1, abs=0.01) and worth.truncated == 0 and worth.lost == 0


@pytest.mark.parametrize("variance", [2.0, 50.0, 5000.0])
def test_the_suggested_power_keeps_the_share_asked_for(variance):
    ratio = log_normal(variance)
    power = power_for(ratio, 0.5)
    assert power == pytest.approx(math.sqrt(math.log(2) / variance), rel=0.02)  # exp(-power^2 variance) = 1/2
    assert effective(power * ratio) == pytest.approx(0.5, abs=1e-6)
    assert power_for(log_normal(0.1), 0.5) == 1.0
