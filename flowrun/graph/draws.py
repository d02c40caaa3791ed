"""Random numbers by name: a generator's seed is a hash of what it is for, so nothing depends on order or batch size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def dropout(self, unit: Unit) -> Iterator[None]:
        """torch's global generators inside the block: keyed by (run seed, row id, unit name, epoch), as before after it.

        A network that is being trained draws its dropout there, and from nowhere else."""
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=gpus):
            seed_networks(seed_of(self.seed, self.row_id, unit.name, self.epoch, "dropout"))
            yield


def seed_networks(key: int) -> None:
    """torch.manual_seed for the generators in use; that one also formats a stack trace for each kind of device (0.2 ms)."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(key)
