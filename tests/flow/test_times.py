"""Noise levels at which finished samples are noised again."""

import pytest
import torch

from flowrun.flow.times import Times, candidates, draw_times

SCHEDULE = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.05, 0.0])


def times(kind, count, least=0.1, greatest=0.9, shift=1.0, seed=0):
    return draw_times(kind, count, least, greatest, shift, SCHEDULE, torch.Generator().manual_seed(seed))


def test_discrete_levels_are_different_ones_of_the_schedule_within_the_range():
    assert candidates(SCHEDULE, 0.1, 0.9).tolist() == pytest.approx([0.8, 0.5, 0.2])
    found = [tuple(times(Times.discrete, 2, seed=seed).tolist()) for seed in range(40)]
    assert all(len(set(one)) == 2 and set(one) <= set(candidates(SCHEDULE, 0.1, 0.9).tolist()) for one in found)
    assert len(set(found)) == 6  # every pair in both orders
    with pytest.raises(ValueError, match="4 levels of 3"):
        times(Times.discrete, 4)


def test_the_end_of_a_walk_is_never_a_level():
    assert 0.0 not in candidates(SCHEDULE, 0.0, 1.0)


@pytest.mark.parametrize("kind", [Times.uniform, Times.logit_normal])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_continuous_draws_take_one_level_of_each_equally_likely_part(kind, shift):
    count = 8
    found = times(kind, count, shift=shift).double().sort().values
    assert found.min() >= 0.1 and found.max() <= 0.9
    plain = found / (shift + (1 - shift) * found)  # the shift undone
    ends = torch.tensor([0.1, 0.9], dtype=torch.float64)
    ends = ends / (shift + (1 - shift) * ends)
    share = torch.special.ndtr(plain.logit()) if kind is Times.logit_normal else plain
    low, high = torch.special.ndtr(ends.logit()) if kind is Times.logit_normal else ends
    parts = ((share - low) / (high - low) * count - 1e-4).floor()
    assert parts.tolist() == list(range(count))


def test_the_shift_moves_draws_toward_noise():
    assert times(Times.uniform, 400, shift=3.0).mean() > times(Times.uniform, 400).mean() + 0.1
