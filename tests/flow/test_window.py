"""Which steps inject noise."""

import random

import pytest

from flowrun.flow.window import Window, noisy_steps

CANDIDATES = range(1, 8)


def steps(kind, size=3, stay=2, epoch=0):
    return noisy_steps(kind, size, stay, CANDIDATES, random.Random(epoch), epoch)


def test_all_are_all():
    assert steps(Window.all) == tuple(CANDIDATES)


@pytest.mark.parametrize("kind", [Window.random, Window.contiguous])
def test_a_few_differ_from_epoch_to_epoch_and_reach_every_step(kind):
    found = [steps(kind, epoch=epoch) for epoch in range(60)]
    assert all(len(set(one)) == 3 and tuple(sorted(one)) == one for one in found)
    assert {step for one in found for step in one} == set(CANDIDATES)
    neighbours = all(one[-1] - one[0] == 2 for one in found)
    assert neighbours == (kind is Window.contiguous)


def test_a_moving_window_goes_from_the_noisiest_step_on_and_begins_again():
    firsts = [steps(Window.moving, epoch=epoch)[0] for epoch in range(12)]
    assert firsts == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 1, 1]


def test_more_steps_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="8 steps of 7"):
        steps(Window.random, size=8)
