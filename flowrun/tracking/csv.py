"""metrics.csv: one line per logged step, numbers as Python writes them, so that reading them back loses nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from flowrun.disk import saving
from flowrun.files import write_atomic
from flowrun.tracking import Tracked, Tracker


class Csv(Tracker):
    optional = False

    def __init__(self, config: Tracker.Config, run: Tracked) -> None:
        self.path = run.directory / "metrics.csv"
        self._names: list[str] = ["step"]
        self._file: IO[str] | None = None  # open to append, once the line of names is written
        if self.path.exists():
            self._names, rows = self._read()
            # What was logged after the checkpoint that the run goes on from comes again.
            self._write([row for row in rows if int(row["step"]) <= run.start])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line; a name that was not there before adds a column, empty in earlier lines.

        Raises Failure when the disk is full."""
        row = {"step": repr(step)} | {name: repr(value) for name, value in metrics.items()}
        new = [name for name in row if name not in self._names]
        if new or not self.path.exists():
            rows = self._read()[1] if self.path.exists() else []
            self._names += new
            self._write([*rows, row])
            return
        with saving(self.path.parent, "metrics"):
            if self._file is None:
                self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115 - closed by `close`
            self._file.write(_lines(self._names, [row]))
            self._file.flush()

    def close(self, failed: bool) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and lines. A last line cut by a kill is left out: half a number is another number."""
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        return list(reader.fieldnames or ["step"]), list(reader)

    def _write(self, rows: Sequence[Mapping[str, str]]) -> None:
        self.close(failed=False)  # the file will be another one
        text = _lines(self._names, [dict(zip(self._names, self._names, strict=True)), *rows])
        with saving(self.path.parent, "metrics"):
            write_atomic(Path(self.path), text.encode())


def _lines(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, names, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()
