"""Sweeps: every job is a child process, and one table holds what came of each. No torch.

outputs/sweeps/<run id>/   sweep.csv, <job number>-<what is swept>/ as any run directory

A child's exit returns all its memory and leaves no library state to the next job. The table is read, extended and
replaced under a lock for each job, so that launchers which run jobs side by side keep it whole.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from flowrun.config import ConfigError
from flowrun.files import write_atomic
from flowrun.launch import STOPPED, Command, inside_ranks, run_children

STATUS = {0: "ok", 2: "refused", STOPPED: "stopped"}  # of a job, by its exit code; any other code: failed
ALWAYS = ("job", "status", "seconds")  # columns that the printed table has in any case
SAID = ("status", "stage", "task", "model")  # of result.json, which other columns say
RESULT = "result.json"
LONGEST = 80  # characters of a job's directory name
REASON = "FLOWRUN_SWEEP_REASON"  # names the file where a job writes why it ended, before it has a directory
WIDEST = 40  # characters of a cell in the printed table; sweep.csv holds all of it


@dataclass
class Sweep:
    """root: the sweep's directory. flags: Hydra's flags that every child needs, e.g. --config-dir DIR.
    asked: the settings as they were given. dry: the jobs write nothing, and neither does the sweep.

    Made before Hydra composes, because Hydra then writes multirun.yaml into `root` even if it refuses the jobs."""

    run_id: str
    root: Path
    flags: Sequence[str]
    asked: Sequence[str] = ()
    dry: bool = False

    def __post_init__(self) -> None:
        self.written = Path(tempfile.mkdtemp(prefix="flowrun-")) if self.dry else self.root
        self._new = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self._before = self._table_as_of()

    def check(self) -> None:
        """Raises ConfigError when no sweep can start here, or another has been."""
        if inside_ranks():
            what = "a sweep cannot run inside launched ranks"
            raise ConfigError("-m", what, "start it from one process; each job starts its own")
        if self.table.exists() and self._record.exists():
            before = yaml.safe_load(self._record.read_text(encoding="utf-8"))["hydra"]["overrides"]["task"]
            if _without_id(before) != _without_id(self.asked):
                raise self._another()

    @property
    def _record(self) -> Path:
        """Hydra's own account of the sweep."""
        return self.root / "multirun.yaml"

    def _another(self) -> ConfigError:
        fix = "leave run_id out or give a new one; a stopped sweep goes on with its own settings"
        return ConfigError("run_id", f"{self.root} holds another sweep", fix)

    def job(self, number: int, overrides: Sequence[str], keys: Collection[str], found_by: Sequence[str]) -> None:
        """Run one job and add its row. A job that fails leaves its status there and the sweep goes on; one that an
        earlier command of this run_id has finished is not run again.

        keys: the settings that are swept. found_by: overrides of Hydra's own that the child needs, its search path.
        Raises KeyboardInterrupt when the sweep was asked to stop; ConfigError as `check` does."""
        self.check()
        own = _without_id(overrides)
        settings = {"job": str(number), **dict(map(_key_value, own))}
        if self._is_done(settings):
            return
        swept = ["=".join(pair) for pair in map(_key_value, overrides) if pair[0] in keys]
        directory = self.root / _name(number, swept)
        sys.stdout.write(f"job {number}: {' '.join(swept) or 'nothing swept'} -> {directory}\n")
        sys.stdout.flush()
        if _finished(directory):  # by a child that outlived its sweep
            self._add({**settings, "status": STATUS[0], **_result(directory), "directory": str(directory)})
            return
        reason = self.written / f".{number}.reason"
        environment = {"FLOWRUN_RUN_DIR": str(directory), "FLOWRUN_SWEEP": self.run_id,
                       "FLOWRUN_RUN_ID": f"{self.run_id}-{number}", REASON: str(reason)}  # fmt: skip
        self.written.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        (code,), stopped = run_children([Command([*self.flags, *own, *found_by, "hydra.mode=RUN"], environment)])
        outcome = {
            "status": STATUS.get(code, "failed"),
            "seconds": f"{time.monotonic() - began:.1f}",
            **_taken(reason),
            **_result(directory),
        }
        self._add({**settings, **outcome, "directory": str(directory) if directory.exists() else ""})
        if stopped:
            raise KeyboardInterrupt

    def _is_done(self, settings: dict[str, str]) -> bool:
        """Whether the job has ended well before. Raises ConfigError when its number was another job's."""
        row = next((row for row in self.rows() if row["job"] == settings["job"]), None)
        if row is None:
            return False
        if any(row.get(name) != value for name, value in settings.items()):
            raise self._another()
        if row["status"] == STATUS[0]:
            sys.stdout.write(f"job {settings['job']}: is done -> {row['directory']}\n")
            self._add(row)
        return row["status"] == STATUS[0]

    def finish(self) -> int:
        """Print the table, and remove what Hydra left when no job ran. Returns 1 when a job did not end well."""
        rows = self.rows() if self._table_as_of() != self._before else []
        if rows:
            sys.stdout.write("\n".join([_text(rows), *([] if self.dry else [str(self.table)]), ""]))
        if self.dry:
            shutil.rmtree(self.written)
        if self.dry or not rows:
            self._remove_litter()
        return int(any(row["status"] != "ok" for row in rows))

    @property
    def table(self) -> Path:
        return self.written / "sweep.csv"

    def _table_as_of(self) -> tuple[int, int] | None:
        """Changes with every row added: the table is replaced by a new file then."""
        return (self.table.stat().st_ino, self.table.stat().st_mtime_ns) if self.table.exists() else None

    def rows(self) -> list[dict[str, str]]:
        if not self.table.exists():
            return []
        with open(self.table, newline="", encoding="utf-8") as handle:
            return list(csv.DictReader(handle))

    def _add(self, row: dict[str, str]) -> None:
        with _locked(self.written):
            others = [other for other in self.rows() if other["job"] != row["job"]]
            rows = sorted([*others, row], key=lambda r: int(r["job"]))
            text = io.StringIO()
            writer = csv.DictWriter(text, _columns(rows), restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_atomic(self.table, text.getvalue().encode())

    def _remove_litter(self) -> None:
        if self.root not in self._new or not self.root.is_dir():
            return
        self._record.unlink(missing_ok=True)
        for folder in self._new:
            if not any(folder.iterdir()):
                folder.rmdir()


def _without_id(overrides: Sequence[str]) -> list[str]:
    """run_id names the sweep, not the job."""
    return [text for text in overrides if not text.startswith(("run_id=", "hydra."))]


def _key_value(text: str) -> tuple[str, str]:
    """Key, and value as one reads it: text without quotes and escapes."""
    override = OverridesParser.create().parse_override(text)
    value = override.value()
    return override.key_or_group, f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _name(number: int, swept: Sequence[str]) -> str:
    """Readable and safe in a path: 3-seed=1-shared=a_b."""
    last = [re.sub(r"^[^=]*[./+~]", "", text) for text in swept]
    return re.sub(r"[^\w.=-]+", "_", "-".join([str(number), *last])).strip("_.")[:LONGEST]


def _taken(reason: Path) -> dict[str, str]:
    """What the job has written to the file, as `result.reason`; the file is gone then."""
    if not reason.exists():
        return {}
    text = reason.read_text(encoding="utf-8")
    reason.unlink()
    return {"result.reason": text}


def _finished(directory: Path) -> bool:
    """Whether a run there ended well, whatever the table says."""
    try:
        return json.loads((directory / RESULT).read_text()).get("status") == "finished"
    except (FileNotFoundError, ValueError):
        return False


def _result(directory: Path) -> dict[str, str]:
    """The scalar values of the job's result.json, each under `result.<name>`."""
    file = directory / RESULT
    if not file.exists():
        return {}
    result = {k: v for k, v in json.loads(file.read_text()).items() if k not in SAID}
    scalars = {k: v for k, v in result.items() if isinstance(v, str | int | float | bool)}
    return {f"result.{name}": str(value) for name, value in scalars.items()}


def _columns(rows: Sequence[dict[str, str]]) -> list[str]:
    """job, settings, status, seconds, results, directory; within a part in the order of first appearance."""
    seen = list(dict.fromkeys(name for row in rows for name in row))
    results = [name for name in seen if name.startswith("result.")]
    fixed = ("job", "status", "seconds", "directory")
    settings = [name for name in seen if name not in fixed and name not in results]
    return ["job", *settings, "status", "seconds", *results, "directory"]


def _text(rows: Sequence[dict[str, str]]) -> str:
    """The table for a terminal: the columns in which jobs differ, without the directory that the lines above have shown."""
    columns = [name for name in _columns(rows) if name in ALWAYS or (name != "directory" and _differs(rows, name))]
    cells = [columns, *([row.get(name) or "" for name in columns] for row in rows)]
    cells = [[_short(cell) for cell in line] for line in cells]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _differs(rows: Sequence[dict[str, str]], name: str) -> bool:
    return len(rows) == 1 or len({row.get(name) or "" for row in rows}) > 1


def _short(cell: str) -> str:
    """Six digits of a long number, the beginning of a long text."""
    if re.fullmatch(r"-?\d+\.\d{6,}(e-?\d+)?", cell):
        return f"{float(cell):.6g}"
    return cell if len(cell) <= WIDEST else cell[: WIDEST - 1] + "…"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
