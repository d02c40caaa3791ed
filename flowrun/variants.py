"""The ways in which a row may reach its units: the data's variants of it times the algorithm's changes to its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrun.data import Row, Source
from flowrun.graph import seed_of

Choose = Callable[[int, str, int], int]  # (seed, row id, epoch) -> index of a change


class Variants:
    """Indexed 0 ... len - 1; each is cached once, and every visit of a row takes one of them."""

    def __init__(self, source: Source, changes: Sequence[Mapping[str, Any]] = ({},), choose: Choose | None = None) -> None:
        self.source, self.changes, self._choose = source, list(changes), choose

    def __len__(self) -> int:
        return self.source.variants * len(self.changes)

    def row(self, row: Row, index: int) -> Row:
        return self.source.variant(row, index // len(self.changes))

    def change(self, index: int) -> Mapping[str, Any]:
        """Inputs that the algorithm replaces, by name."""
        return self.changes[index % len(self.changes)]

    def choose(self, seed: int, row_id: str, epoch: int) -> int:
        """The index for one visit: a function of its arguments alone, every variant of the data as likely as the others."""
        if len(self) == 1:
            return 0
        change = self._choose(seed, row_id, epoch) if len(self.changes) > 1 else 0
        return seed_of(seed, "variant", row_id, epoch) % self.source.variants * len(self.changes) + change
