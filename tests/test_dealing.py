"""Who samples and trains which picture: nothing is lost or doubled, and the number of processes changes nobody's work."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from flowrun.config import ConfigError
from flowrun.dealing import Deal, deal, prompts_of

DEAL = Deal(pictures=48, chunk=12, micro=4, updates=3, world=1)


def on(world):
    return Deal(48, 12, 4, 3, world)


def passes(made, update, rank):
    return made.passes(update, rank, random.Random(7))


def test_every_picture_is_trained_once_in_a_pass():
    seen = Counter(number for update in range(3) for micro in passes(DEAL, update, 0) for number in micro)
    assert seen == Counter(range(48))


@pytest.mark.parametrize("world", [2, 4])
def test_more_processes_do_the_same_updates_with_the_pictures_that_they_sampled(world):
    made = on(world)
    assert not made.faults
    assert sorted(n for rank in range(world) for chunk in made.chunks(rank) for n in chunk) == list(range(48))
    for update in range(3):
        alone = passes(DEAL, update, 0)
        for rank in range(world):
            own = passes(made, update, rank)
            assert own == alone[rank::world]
            assert {n for micro in own for n in micro} <= {n for chunk in made.chunks(rank) for n in chunk}


def test_micro_batches_are_shuffled_and_differ_from_pass_to_pass():
    one, two = (DEAL.passes(0, 0, random.Random(seed)) for seed in (1, 2))
    assert one != two and one[0] != sorted(one[0])


def settings(prompts=6, group=4, batch=16, updates=2):
    return SimpleNamespace(prompts_per_epoch=prompts, group_size=group, batch_size=batch, updates=updates, pictures=prompts * group)


@pytest.mark.parametrize("numbers, micro, world", [((6, 4, 16, 2), 4, 2), ((3, 4, 8, 1), 4, 2), ((8, 4, 8, 3), 4, 1), ((4, 4, 8, 2), 3, 1)])
def test_numbers_that_do_not_divide_are_refused_with_the_nearest_that_do(numbers, micro, world):
    """Three processes' worth of batch 2 in groups of 4 is the same kind of mistake."""
    with pytest.raises(ConfigError) as refused:
        deal(settings(*numbers), micro, world)
    named = dict(part.split("=") for part in refused.value.fix.removeprefix("alone each of these would do: ").split(", "))
    assert named
    for key, values in named.items():
        for value in map(int, values.split(" or ")):
            prompts, group, batch, updates = numbers
            changed = {"rollout.prompts_per_epoch": prompts, "rollout.group_size": group, "rollout.batch_size": batch,
                       "train.batch_size": micro, "rollout.updates": updates, key: value}  # fmt: skip
            made = deal(settings(*list(changed.values())[:3], changed["rollout.updates"]), changed["train.batch_size"], world)
            assert not made.faults


def test_epochs_go_through_all_prompts_in_turn_and_never_take_one_twice():
    epochs = [prompts_of(epoch, 4, 10, seed=0) for epoch in range(6)]
    assert all(len(set(one)) == 4 for one in epochs)
    assert not set(epochs[0]) & set(epochs[1])  # of one turn
    assert epochs != [prompts_of(epoch, 4, 10, seed=1) for epoch in range(6)]
    assert {row for epoch in range(40) for row in prompts_of(epoch, 4, 10, 0)} == set(range(10))
