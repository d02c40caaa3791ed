"""A sweep's table as a page shows it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = "sweep.csv"
ALWAYS = ("job", "status", "seconds")


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, folder: Path) -> Table:
        with open(folder / TABLE, newline="", encoding="utf-8") as handle:
            reader = csv.DictReader(handle)
            rows = list(reader)
        return cls(list(reader.fieldnames or []), rows)

    @property
    def telling(self) -> list[str]:
        """Columns in which jobs differ, and those that every table has; the directory stands elsewhere."""
        differ = {name for name in self.columns if len({row[name] for row in self.rows}) > 1 or len(self.rows) == 1}
        return [name for name in self.columns if name in ALWAYS or (name in differ and name != "directory")]

    def swept(self, row: Mapping[str, str]) -> str:
        """What tells a job from the others: number, and the settings that differ."""
        settings = [name for name in self.telling if name not in ALWAYS and not name.startswith("result.")]
        return " ".join([row["job"], *(f"{name.split('.')[-1]}={row[name]}" for name in settings if row[name])])
