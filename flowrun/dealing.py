"""Which picture of an epoch is sampled by which process, and trained in which update.

An epoch samples a group of K pictures for each of M prompts, N = M K in all. They are denoised in chunks; chunk c is the work
of process c mod W. Micro-batches are cut out of chunks, so no picture ever changes its process, and dealt in turns from one
chunk after another: micro-batch m of a pass is of process m mod W. Who does what thus depends on W, and what is done does not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrun.config import ConfigError
from flowrun.graph import seed_of
from flowrun.rollout_settings import KEY, RolloutSettings


@dataclass(frozen=True)
class Deal:
    """Which picture is sampled and trained where. pictures: of an epoch; chunk, micro: pictures in one; world: processes."""

    pictures: int
    chunk: int
    micro: int
    updates: int
    world: int

    @property
    def faults(self) -> list[str]:
        """What does not divide, in words; empty when all does."""
        found = []
        if self.pictures % (self.chunk * self.world):
            found.append(f"{self.pictures} pictures do not divide into chunks of {self.chunk} on {self.world} processes")
        if self.chunk % self.micro:
            found.append(f"a chunk of {self.chunk} does not divide into micro-batches of {self.micro}")
        elif not found and self.pictures // self.micro % (self.updates * self.world):
            count = self.pictures // self.micro
            found.append(f"{count} micro-batches do not divide into {self.updates} updates on {self.world} processes")
        return found

    def chunks(self, rank: int) -> list[range]:
        """Numbers of the pictures that a process samples, chunk by chunk."""
        starts = range(rank * self.chunk, self.pictures, self.chunk * self.world)
        return [range(start, start + self.chunk) for start in starts]

    def passes(self, update: int, rank: int, shuffle: random.Random) -> list[list[int]]:
        """A process's micro-batches of update number `update` of a pass: numbers of pictures. shuffle: keyed by the pass."""
        order = list(self._micros(shuffle))
        per_update = len(order) // self.updates
        return order[update * per_update + rank : (update + 1) * per_update : self.world]

    def _micros(self, shuffle: random.Random) -> Iterator[list[int]]:
        """All of a pass: one of the first chunk, one of the second, ... and round again; each chunk's pictures shuffled."""
        chunks = [list(range(start, start + self.chunk)) for start in range(0, self.pictures, self.chunk)]
        for chunk in chunks:
            shuffle.shuffle(chunk)
        for at in range(0, self.chunk, self.micro):
            for chunk in chunks:
                yield chunk[at : at + self.micro]


def deal(settings: RolloutSettings, micro: int, world: int) -> Deal:
    """Raises ConfigError when the numbers do not divide: what, and for each of them the nearest that would."""
    made = Deal(settings.pictures, settings.batch_size, micro, settings.updates, world)
    if not made.faults:
        return made
    sizes = {
        f"{KEY}.prompts_per_epoch": (settings.prompts_per_epoch, lambda n: replace(made, pictures=n * settings.group_size)),
        f"{KEY}.group_size": (settings.group_size, lambda n: replace(made, pictures=n * settings.prompts_per_epoch)),
        f"{KEY}.batch_size": (settings.batch_size, lambda n: replace(made, chunk=n)),
        "train.batch_size": (micro, lambda n: replace(made, micro=n)),
        f"{KEY}.updates": (settings.updates, lambda n: replace(made, updates=n)),
    }
    right = []
    for key, (value, other) in sizes.items():
        least = 2 if key == f"{KEY}.group_size" else 1
        near = [n for n in range(least, 4 * max(value, made.chunk * world) + 1) if not other(n).faults]
        below, above = [n for n in near if n < value][-1:], [n for n in near if n > value][:1]
        if below or above:
            right.append(f"{key}={' or '.join(map(str, below + above))}")
    fix = "alone each of these would do: " + ", ".join(right) if right else "change several of them"
    product = f"{settings.prompts_per_epoch} prompts x {settings.group_size} are "
    raise ConfigError(KEY, f"{product}{'; '.join(made.faults)}", fix)


def prompts_of(epoch: int, count: int, rows: int, seed: int) -> list[int]:
    """Which rows an epoch samples: `count` different ones of `rows`. Epochs go in turn through all rows, shuffled anew for each
    turn, of which those are left out that fill no epoch."""
    turn, place = divmod(epoch, rows // count)
    order = list(range(rows))
    random.Random(seed_of(seed, "prompts", turn)).shuffle(order)
    return order[place * count : (place + 1) * count]
