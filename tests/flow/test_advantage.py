"""Advantages against exact fractions and plain NumPy; groups that say nothing stay silent."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from flowrun.flow.advantage import Aggregate, Spread, advantages

FLOOR = 1e-6
BOTH = pytest.mark.parametrize("aggregate", list(Aggregate))
SPREADS = pytest.mark.parametrize("spread", list(Spread))


def given(rewards, groups, aggregate=Aggregate.sum, spread=Spread.group, weights=None):
    rewards = {name: torch.as_tensor(r, dtype=torch.float32) for name, r in rewards.items()}
    weights = weights or dict.fromkeys(rewards, 1.0)
    return advantages(rewards, weights, torch.as_tensor(groups), aggregate, spread, FLOOR)


def drawn(rows=48, names=("a", "b"), seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards = {name: torch.randn(rows, generator=generator) * (i + 1) + 3 * i for i, name in enumerate(names)}
    return rewards, torch.arange(rows) % 8


def standard(r, groups, std_of):
    """(r - mean_g) / std by NumPy, group by group."""
    out = np.empty_like(r)
    for g in np.unique(groups):
        own = groups == g
        out[own] = (r[own] - r[own].mean()) / (r[own] if std_of is Spread.group else r).std()
    return out


@SPREADS
def test_sum_is_the_weighted_sum_standardised(spread):
    rewards, groups = drawn()
    weights = {"a": 0.3, "b": -2.0}
    found = given(rewards, groups, Aggregate.sum, spread, weights)
    total = 0.3 * rewards["a"].double().numpy() - 2 * rewards["b"].double().numpy()
    np.testing.assert_allclose(found.values, standard(total, groups.numpy(), spread), rtol=1e-6, atol=1e-7)
    assert found.values.dtype == torch.float32 and (found.dead, found.failed, found.groups) == (0, 0, 8)


@SPREADS
def test_gdpo_standardises_each_reward_and_then_the_batch(spread):
    rewards, groups = drawn()
    weights = {"a": 0.3, "b": -2.0}
    found = given(rewards, groups, Aggregate.gdpo, spread, weights)
    c = sum(w * standard(rewards[n].double().numpy(), groups.numpy(), spread) for n, w in weights.items())
    np.testing.assert_allclose(found.values, (c - c.mean()) / c.std(), rtol=1e-6, atol=1e-7)


def test_exact_fractions_with_fifty_digits():
    """Rewards that no binary number holds; the truth from the fp32 values as exact fractions."""
    rewards = [0.1, 0.7, 0.35, 0.2, 1.9, 0.3]
    exact = [Fraction(float(np.float32(r))) for r in rewards]
    mean = sum(exact) / len(exact)
    variance = sum((r - mean) ** 2 for r in exact) / len(exact)
    with mpmath.workdps(50):
        std = mpmath.sqrt(mpmath.mpf(variance.numerator) / variance.denominator)
        truth = [float(mpmath.mpf((r - mean).numerator) / (r - mean).denominator / std) for r in exact]
    np.testing.assert_array_equal(given({"r": rewards}, [0] * 6).values, np.float32(truth))


@SPREADS
def test_each_group_has_mean_zero(spread):
    rewards, groups = drawn()
    values = given(rewards, groups, Aggregate.sum, spread).values.double()
    assert max(abs(float(values[groups == g].mean())) for g in range(8)) < 1e-7


@BOTH
@SPREADS
@pytest.mark.parametrize("value", [26.31, 21.7, 0.1, -1e-3, 1e6])
def test_equal_rewards_have_exactly_no_advantage(aggregate, spread, value):
    alone = given({"r": [value] * 96}, [0] * 96, aggregate, spread, {"r": 0.7})
    assert not alone.values.any() and alone.dead == alone.groups == 1
    beside = given({"r": [value] * 96 + [1.0, 2.0]}, [0] * 96 + [1] * 2, aggregate, spread, {"r": 0.7})
    assert not beside.values[:96].any() and beside.values[96] < 0 < beside.values[97] and beside.dead == 1


@BOTH
@SPREADS
def test_equal_up_to_rounding_is_equal(aggregate, spread):
    """One unit in the last place of fp32 would have advantages of size 1."""
    value = np.float32(26.31)
    rewards = [value, np.nextafter(value, np.float32(27)), value, value]
    found = given({"r": rewards}, [0] * 4, aggregate, spread)
    assert not found.values.any() and found.dead == 1


@BOTH
def test_rewards_that_cancel_leave_rounding_and_no_advantage(aggregate):
    rewards, groups = drawn(names=("a",))
    opposed = {"a": rewards["a"] * 1000, "b": -rewards["a"] * 1000 + 0.31}
    assert not given(opposed, groups, aggregate).values.any()


def test_a_small_real_difference_counts_in_full():
    rewards = torch.tensor([0.0, 1e-4, 2e-4, 3e-4])
    expected = torch.tensor([-1.5, -0.5, 0.5, 1.5]) / math.sqrt(1.25)
    torch.testing.assert_close(given({"r": rewards}, [0] * 4).values, expected)


@pytest.mark.parametrize("other", [0.36, 0.9, 1e4])
def test_seven_equal_rewards_and_one_other_are_bounded(other):
    """A lone one among n is at sqrt(n - 1) deviations, whatever its distance; the equal ones share the rest."""
    values = given({"r": [0.35] * 7 + [other]}, [5] * 8).values
    torch.testing.assert_close(values, torch.tensor([-1 / math.sqrt(7)] * 7 + [math.sqrt(7)]))


@BOTH
@SPREADS
def test_scale_and_offset_of_a_reward_do_not_matter(aggregate, spread):
    rewards, groups = drawn(names=("r",))
    once = given(rewards, groups, aggregate, spread).values
    scaled = given({"r": rewards["r"].double() * 37 + 5}, groups, aggregate, spread).values
    torch.testing.assert_close(once, scaled, rtol=1e-4, atol=1e-5)
    turned = given({"r": -rewards["r"]}, groups, aggregate, spread).values
    torch.testing.assert_close(once, -turned, rtol=1e-6, atol=1e-7)


def test_gdpo_with_one_reward_is_the_groups_own_standard_times_a_constant():
    rewards, groups = drawn(names=("r",))
    gdpo = given(rewards, groups, Aggregate.gdpo).values
    own = given(rewards, groups, Aggregate.sum, Spread.group).values
    ratio = gdpo / own
    torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio[0])), rtol=1e-5, atol=0)


@BOTH
@SPREADS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_failed_sample_shifts_no_other(aggregate, spread, bad):
    """The others have what they had if it had never been drawn."""
    rewards, groups = drawn()
    keep = torch.arange(48) != 10
    without = given({n: r[keep] for n, r in rewards.items()}, groups[keep], aggregate, spread)
    rewards["b"][10] = bad
    found = given(rewards, groups, aggregate, spread)
    assert torch.equal(found.values[keep], without.values)
    assert found.values[10] == 0 and found.failed == 1


def test_a_failure_in_what_is_only_measured_costs_nothing():
    rewards, groups = drawn()
    weights = {"a": 1.0, "b": 0.0}
    alone = given({"a": rewards["a"]}, groups)
    rewards["b"][3] = math.nan
    found = given(rewards, groups, weights=weights)
    assert torch.equal(found.values, alone.values) and found.failed == 0
    assert set(found.means) == {"a", "b"} and math.isfinite(found.means["b"])


@BOTH
@SPREADS
def test_groups_of_one_or_none_valid_are_dead(aggregate, spread):
    nan = math.nan
    found = given({"r": [1.0, 2.0, 5.0, nan, nan, nan]}, [0, 0, 1, 1, 2, 2], aggregate, spread)
    assert found.values[0] < 0 < found.values[1] and not found.values[2:].any()
    assert (found.groups, found.dead, found.failed) == (3, 2, 3)


def test_everything_failed_is_no_error_and_no_signal():
    found = given({"r": [math.nan] * 4}, [0, 0, 1, 1])
    assert not found.values.any() and found.failed == 4 and found.dead == 2
    assert math.isnan(found.means["r"]) and math.isnan(found.stds["r"])


def test_figures_are_averages_over_groups():
    found = given({"r": [0.0, 2.0, 10.0, 16.0, math.nan]}, [7, 7, 9, 9, 9])
    assert found.means["r"] == 7.0 and found.stds["r"] == 2.0


def test_groups_that_fp32_could_not_tell_apart_stay_apart():
    big = 2**62
    assert torch.tensor([big]).float() == torch.tensor([big + 1]).float()
    apart = given({"r": [1.0, 2.0, 11.0, 12.0]}, [big, big, big + 1, big + 1])
    assert apart.groups == 2 and torch.equal(apart.values, torch.tensor([-1.0, 1.0, -1.0, 1.0]))


@BOTH
@SPREADS
def test_order_of_samples_does_not_matter(aggregate, spread):
    rewards, groups = drawn()
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    mixed = given({n: r[order] for n, r in rewards.items()}, groups[order], aggregate, spread).values
    torch.testing.assert_close(mixed, given(rewards, groups, aggregate, spread).values[order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("rewards", "groups", "weights", "words"), [
    ({"r": torch.zeros(3)}, torch.zeros(4, dtype=torch.int64), {"r": 1.0}, r"reward r is \[3\] for 4 samples"),
    ({"r": torch.zeros(3)}, torch.zeros(3), {"r": 1.0}, "integers"),
    ({"r": torch.zeros(3)}, torch.zeros(3, dtype=torch.int64), {"r": 0.0}, "no reward has a weight"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(rewards, groups, weights, words):
    with pytest.raises(ValueError, match=words):
        advantages(rewards, weights, groups, Aggregate.sum, Spread.group, FLOOR)
