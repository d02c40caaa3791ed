"""sweep.csv: a row per job, as text. Read, extended and replaced under a lock, so that jobs side by side keep it whole. No torch.

Columns: job, the settings given, status, device, seconds, `result.<name>` for the single values of result.json, directory.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowrun.files import write_atomic

Row = dict[str, str]

RESULT = "result."  # before the names of result.json
FIXED = ("job", "status", "device", "seconds", "directory")


@dataclass(frozen=True)
class Table:
    path: Path

    def rows(self) -> list[Row]:
        """By number of their jobs; none before the first."""
        if not self.path.exists():
            return []
        with open(self.path, newline="", encoding="utf-8") as handle:
            return list(csv.DictReader(handle))

    def add(self, row: Row) -> None:
        """In place of an earlier one of the same job."""
        with _locked(self.path.parent):
            others = [other for other in self.rows() if other["job"] != row["job"]]
            rows = sorted([*others, row], key=lambda r: int(r["job"]))
            text = io.StringIO()
            writer = csv.DictWriter(text, columns(rows), restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_atomic(self.path, text.getvalue().encode())

    def as_of(self) -> tuple[int, int] | None:
        """Changes with every row added: the table is replaced by a new file then."""
        return (self.path.stat().st_ino, self.path.stat().st_mtime_ns) if self.path.exists() else None


def settings(rows: Sequence[Row]) -> list[str]:
    """Columns of what was set, in the order of first appearance."""
    seen = dict.fromkeys(name for row in rows for name in row)
    return [name for name in seen if name not in FIXED and not name.startswith(RESULT)]


def columns(rows: Sequence[Row]) -> list[str]:
    """All of them; results in the order of first appearance."""
    seen = dict.fromkeys(name for row in rows for name in row)
    results = [name for name in seen if name.startswith(RESULT)]
    device = ["device"] if "device" in seen else []
    return ["job", *settings(rows), "status", *device, "seconds", *results, "directory"]


def differs(rows: Sequence[Row], name: str) -> bool:
    return len({row.get(name) or "" for row in rows}) > 1


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
