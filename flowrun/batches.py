"""Which rows train together, and when: an endless, keyed sequence of batches of equal picture size.

The order is a function of (seed, epoch) alone, so a position in it is one number, and a resumed run goes on exactly
where the interrupted one stopped. B batch size, W processes, A accumulated micro-batches per optimiser step.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flowrun.config import Remainder
from flowrun.graph import seed_of


@dataclass(frozen=True, slots=True)
class Visit:
    """One row of one batch: the row's index, and its epoch (counting repeats), which keys the row's per-epoch draws."""

    row: int
    epoch: int


class Batches:
    """`window(step, rank)` gives the micro-batches of one optimiser step on one process.

    sizes: one per row; only rows of equal size share a batch. buckets: size -> how many rows have it. Every row is used
    `repeat` times per epoch, but for what `remainder` makes of those that fill no batch.
    """

    def __init__(
        self,
        sizes: Sequence[Hashable],
        batch_size: int,
        accumulate: int,
        repeat: int,
        seed: int,
        world: int = 1,
        remainder: Remainder = Remainder.short,
    ) -> None:
        """Raises ValueError, with the size, when remainder is drop and a size never fills a batch."""
        self.sizes, self.batch_size, self.accumulate = sizes, batch_size, accumulate
        self.repeat, self.seed, self.world, self.remainder = repeat, seed, world, remainder
        self._rows: dict[Hashable, list[int]] = {}
        for row, size in enumerate(sizes):
            self._rows.setdefault(size, []).append(row)
        self.buckets = {size: len(rows) for size, rows in sorted(self._rows.items())}
        self.left_over = {size: count * repeat % batch_size for size, count in self.buckets.items()}  # visits per epoch
        for size, count in self.buckets.items():
            if remainder is Remainder.drop and count * repeat < batch_size:
                raise ValueError(size)
        full = sum(count * repeat // batch_size for count in self.buckets.values())
        self.per_epoch = full if remainder is Remainder.drop else full + sum(map(bool, self.left_over.values()))
        self._step = self._place = 0  # where `go_on` takes up the sequence

    def place(self, step: int, end: int | None = None) -> int:
        """Batches of the whole sequence that were taken before optimiser step `step`, at most `end`."""
        place = self._place + (step - self._step) * self.accumulate * self.world
        return place if end is None else min(place, end)

    def go_on(self, step: int, place: int, per_epoch: int) -> None:
        """Optimiser step `step` starts after `place` batches, of which an epoch had `per_epoch`: so far a run had come,
        maybe with other numbers of processes. Batches of another size are taken up at the same share of an epoch."""
        self._step, self._place = step, round(place * self.per_epoch / per_epoch)

    def steps(self, epochs: int) -> int:
        """Optimiser steps that use every row `repeat` times in each of `epochs` epochs; the last may be a partial window."""
        return self._step - (self._place - self.per_epoch * epochs) // (self.accumulate * self.world)

    def epoch_of(self, step: int) -> float:
        """Epochs completed after `step` optimiser steps."""
        return self.place(step) / self.per_epoch

    def window(self, step: int, rank: int = 0, end: int | None = None) -> list[list[Visit]]:
        """Micro-batches of optimiser step `step` (0-based) on `rank`: A lists, fewer in a window that `end` cuts off.

        end: number of batches after which training ends (whole epochs), or None for no end.
        """
        first = self.place(step)
        last = first + self.accumulate * self.world
        places = range(first + rank, last if end is None else min(last, end), self.world)
        return [self._at(place) for place in places]

    def rows_in(self, step: int, end: int | None = None) -> int:
        """Rows of optimiser step `step` over all processes: what its summed loss is divided by."""
        return sum(len(batch) for rank in range(self.world) for batch in self.window(step, rank, end))

    def _at(self, place: int) -> list[Visit]:
        epoch, position = divmod(place, self.per_epoch)
        return self._epoch(epoch)[position]

    @lru_cache(maxsize=2)  # noqa: B019 - one object per run; neighbours share a window at an epoch's edge
    def _epoch(self, epoch: int) -> list[list[Visit]]:
        shuffle = random.Random(seed_of(self.seed, "order", epoch))
        visits = [Visit(row, epoch * self._turns + turn) for turn in range(self.repeat) for row in range(len(self.sizes))]
        visits += self._again(epoch)
        shuffle.shuffle(visits)
        open_batches: dict = {size: [] for size in self.buckets}
        batches: list[list[Visit]] = []
        for visit in visits:
            batch = open_batches[self.sizes[visit.row]]
            batch.append(visit)
            if len(batch) == self.batch_size:
                batches.append(batch)
                open_batches[self.sizes[visit.row]] = []
        if self.remainder is not Remainder.drop:
            batches += [batch for batch in open_batches.values() if batch]
        shuffle.shuffle(batches)
        return batches

    def lacking(self, size: Hashable) -> int:
        """Visits that are drawn again in each epoch, so that no batch of this size is short."""
        return -self.left_over[size] % self.batch_size if self.remainder is Remainder.repeat else 0

    @property
    def _turns(self) -> int:
        """Most visits of one row in one epoch."""
        return self.repeat + max((-(-self.lacking(size) // count) for size, count in self.buckets.items()), default=0)

    def _again(self, epoch: int) -> list[Visit]:
        """Further visits: whole turns of a size's rows, then some of them, others in each epoch."""
        again, draws = [], random.Random(seed_of(self.seed, "again", epoch))
        for size in self.buckets:
            rows = self._rows[size]
            turns, rest = divmod(self.lacking(size), len(rows))
            drawn = [*rows * turns, *draws.sample(rows, rest)]
            again += [Visit(row, epoch * self._turns + self.repeat + at // len(rows)) for at, row in enumerate(drawn)]
        return again
