"""Random numbers by name: a generator's seed is a hash of what it is for, so nothing depends on order or batch size."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch

from flowrun.graph.unit import Unit

FROZEN = -1  # stands for the epoch in a draw that is made once for ever


def seed_of(*parts: str | int) -> int:
    """A 63-bit number that depends on every part and its type. Uniform over [0, 2^63)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of one row in one epoch. seed: the run's."""

    seed: int
    row_id: str
    epoch: int
    device: str = "cpu"

    def generator(self, unit: Unit) -> torch.Generator:
        """Keyed by (run seed, row id, unit name, epoch, or -1 when the unit's draw is frozen)."""
        epoch = FROZEN if unit.random == "frozen" else self.epoch
        return torch.Generator(self.device).manual_seed(seed_of(self.seed, self.row_id, unit.name, epoch))
