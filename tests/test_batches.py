"""Which rows train together: everyone as often as asked, sizes never mixed, the same order from any starting point."""

from __future__ import annotations

from collections import Counter

import pytest

from flowrun.batches import Batches, Visit
from flowrun.config import Remainder


def all_visits(batches: Batches, epochs: int) -> list[list[Visit]]:
    end = batches.per_epoch * epochs
    steps = batches.steps(epochs)
    return [
        batch for step in range(steps) for rank in range(batches.world) for batch in batches.window(step, rank, end)
    ]


@pytest.mark.parametrize(
    ("rows", "batch", "accumulate", "repeat", "world"),
    [(10, 4, 1, 1, 1), (10, 4, 3, 1, 1), (7, 2, 2, 3, 2), (5, 8, 1, 1, 2)],
)
def test_every_row_is_visited_equally_often(rows: int, batch: int, accumulate: int, repeat: int, world: int) -> None:
    batches = Batches([(32, 32)] * rows, batch, accumulate, repeat, seed=0, world=world)
    visits = [visit for group in all_visits(batches, 3) for visit in group]
    assert Counter(visit.row for visit in visits) == dict.fromkeys(range(rows), 3 * repeat)
    assert len(set(visits)) == len(visits)  # a repeat is an epoch of its own for the row's draws


def test_batches_never_mix_sizes_and_short_ones_are_kept() -> None:
    sizes = [(64, 64)] * 5 + [(64, 96)] * 3 + [(96, 64)]
    batches = Batches(sizes, 4, 1, 1, seed=1)
    groups = all_visits(batches, 1)
    assert all(len({sizes[visit.row] for visit in group}) == 1 for group in groups)
    assert sorted(map(len, groups)) == [1, 1, 3, 4]
    assert batches.buckets == {(64, 64): 5, (64, 96): 3, (96, 64): 1}


def test_order_depends_on_seed_and_epoch_alone() -> None:
    sizes = [(32, 32)] * 20
    first, again, other = (Batches(sizes, 4, 1, 1, seed=seed) for seed in (0, 0, 1))
    assert [first.window(step) for step in range(10)] == [again.window(step) for step in reversed(range(10))][::-1]
    assert [first.window(step) for step in range(5)] != [other.window(step) for step in range(5)]
    rows = [[[visit.row for visit in batch] for batch in first.window(step)] for step in range(10)]
    assert rows[:5] != rows[5:]


def test_a_step_is_one_update_whatever_is_accumulated() -> None:
    batches = Batches([(32, 32)] * 10, 2, accumulate=4, repeat=1, seed=0)
    assert batches.steps(epochs=2) == 3  # 10 batches in windows of 4
    assert [len(batches.window(step, end=10)) for step in range(3)] == [4, 4, 2]
    assert [batches.rows_in(step, end=10) for step in range(3)] == [8, 8, 4]
    assert batches.epoch_of(5) == pytest.approx(4.0)


def test_processes_share_a_step_without_overlap() -> None:
    alone = Batches([(32, 32)] * 12, 2, accumulate=2, repeat=1, seed=0)
    pair = Batches([(32, 32)] * 12, 2, accumulate=1, repeat=1, seed=0, world=2)
    for step in range(6):
        assert alone.window(step) == pair.window(step, 0) + pair.window(step, 1)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (1, 3)])
def test_another_number_of_processes_goes_on_without_a_row_left_out_or_doubled(before: int, after: int) -> None:
    """3 epochs of 7 batches, 3 steps of which are done before the change."""
    first, second = (Batches([(32, 32)] * 13, 2, accumulate=1, repeat=1, seed=0, world=w) for w in (before, after))
    end = 3 * first.per_epoch
    second.go_on(3, first.place(3), first.per_epoch)
    done = [batch for step in range(3) for rank in range(before) for batch in first.window(step, rank, end)]
    rest = [batch for step in range(3, second.steps(3)) for rank in range(after) for batch in second.window(step, rank, end)]
    assert Counter(visit for batch in [*done, *rest] for visit in batch) == dict.fromkeys(
        (Visit(row, epoch) for row in range(13) for epoch in range(3)), 1
    )
    assert second.epoch_of(second.steps(3)) == pytest.approx(3, abs=after / 7)


def test_batches_of_another_size_go_on_at_the_same_share_of_the_epoch() -> None:
    batches = Batches([(32, 32)] * 40, 4, accumulate=1, repeat=1, seed=0)  # 10 an epoch
    batches.go_on(30, place=30, per_epoch=20)
    assert batches.epoch_of(30) == 1.5 and batches.steps(2) == 35


CASES = [(sizes, batch, repeat, world) for sizes in ("a", "aabbb", "aaaaaaabbbbbccccc") for batch in (1, 2, 3, 5, 8)
         for repeat in (1, 2, 3) for world in (1, 2)]  # fmt: skip


@pytest.mark.parametrize("remainder", ["short", "repeat", "drop"])
def test_rows_that_fill_no_batch_follow_the_rule(remainder: str) -> None:
    """All cases of up to 17 rows in 3 sizes, two epochs each, counted by hand."""
    for sizes, batch, repeat, world in CASES:
        count = Counter(sizes)
        if remainder == "drop" and min(count.values()) * repeat < batch:
            with pytest.raises(ValueError):
                Batches(sizes, batch, 1, repeat, seed=3, remainder=Remainder.drop)
            continue
        batches = Batches(sizes, batch, 1, repeat, seed=3, world=world, remainder=Remainder(remainder))
        groups = all_visits(batches, 2)
        for size, rows in count.items():
            own = [group for group in groups if {sizes[visit.row] for visit in group} == {size}]
            lengths = sorted(map(len, own))
            full, left = divmod(rows * repeat, batch)
            more = {"short": [left] if left else [], "repeat": [batch] if left else [], "drop": []}[remainder]
            assert lengths == sorted([*more, *[batch] * full] * 2)
            seen = Counter(visit.row for group in own for visit in group)
            if remainder == "short":
                assert set(seen.values()) == {2 * repeat}
            if remainder == "repeat":  # within an epoch each row comes `repeat` times, and some once more, or all of them and some twice
                assert min(seen.values()) >= 2 * repeat and max(seen.values()) - min(seen.values()) <= 2
        visits = [visit for group in groups for visit in group]
        assert len(set(visits)) == len(visits), "no visit has the draws of another"
        assert len(groups) == 2 * batches.per_epoch and sum(map(len, groups)) == len(visits)


@pytest.mark.parametrize("remainder", [Remainder.repeat, Remainder.drop])
def test_which_rows_are_drawn_again_or_left_out_changes_with_the_epoch(remainder: Remainder) -> None:
    batches = Batches(["a"] * 10, 4, 1, 1, seed=0, remainder=remainder)
    odd = set()
    for epoch in range(40):
        steps = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
        seen = Counter(visit.row for step in steps for visit in batches.window(step)[0])
        odd.add(frozenset(row for row in range(10) if seen[row] != 1))
    assert all(len(rows) == 2 for rows in odd) and len(odd) > 20
    assert set().union(*odd) == set(range(10))
