"""Sweeps: every job is a child process, one table holds what came of each, a picture and a line say what it means. No torch.

outputs/sweeps/<run id>/   sweep.csv, sweep.png, conclusion.txt, <job number>-<what is swept>/ as any run directory

A child's exit returns all its memory and leaves no library state to the next job.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from flowrun.config import ConfigError, SweepSettings
from flowrun.launch import STOPPED, Command, inside_ranks, run_children
from flowrun.sweep import stopping
from flowrun.sweep.conclusion import conclude
from flowrun.sweep.devices import FILE, placed
from flowrun.sweep.printed import printed
from flowrun.sweep.settings import OK, figure_of, number
from flowrun.sweep.table import RESULT, Row, Table

STATUS = {0: OK, 2: "refused", STOPPED: "stopped"}  # of a job, by its exit code; any other code: failed
SAID = ("status", "stage", "task", "model")  # of result.json, which other columns say
FILE_OF_RESULT = "result.json"
LONGEST = 80  # characters of a job's directory name
REASON = "FLOWRUN_SWEEP_REASON"  # names the file where a job writes why it ended, before it has a directory


@dataclass
class Sweep:
    """root: the sweep's directory. flags: Hydra's flags that every child needs, e.g. --config-dir DIR.
    asked: the settings as they were given. dry: the jobs write nothing, and neither does the sweep.

    Made before Hydra composes, because Hydra then writes multirun.yaml into `written` even if it refuses the jobs."""

    run_id: str
    root: Path
    flags: Sequence[str]
    asked: Sequence[str] = ()
    dry: bool = False

    def __post_init__(self) -> None:
        self.written = Path(tempfile.mkdtemp(prefix="flowrun-")) if self.dry else self.root
        self.table = Table(self.written / "sweep.csv")
        self._new = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self._before = self.table.as_of()
        self._process = os.getpid()
        (self.written / stopping.FILE).unlink(missing_ok=True)  # of a command that was killed

    def check(self) -> None:
        """Raises ConfigError when no sweep can start here, or another has been."""
        if inside_ranks():
            what = "a sweep cannot run inside launched ranks"
            raise ConfigError("-m", what, "start it from one process; each job starts its own")
        if self.table.path.exists() and self._record.exists():
            before = yaml.safe_load(self._record.read_text(encoding="utf-8"))["hydra"]["overrides"]["task"]
            if _without_id(before) != _without_id(self.asked):
                raise self._another()

    @property
    def _record(self) -> Path:
        """Hydra's own account of the sweep."""
        return self.written / "multirun.yaml"

    def _another(self) -> ConfigError:
        fix = "leave run_id out or give a new one; a stopped sweep goes on with its own settings"
        return ConfigError("run_id", f"{self.root} holds another sweep", fix)

    def job(self, number: int, overrides: Sequence[str], keys: Collection[str], found_by: Sequence[str],
            settings: SweepSettings) -> float | None:  # fmt: skip
        """Run one job and add its row. A job that fails leaves its status there and the sweep goes on; one that an
        earlier command of this run_id has finished is not run again.

        keys: the settings that are swept. found_by: overrides of Hydra's own that the child needs, its search path.
        Returns the figure that settings are compared by, for sweepers that choose the next ones by it; None without one.
        Raises KeyboardInterrupt when the sweep was asked to stop, in the process that it was started in: others return, or
        their launcher would kill the jobs that are saving still. Raises ConfigError as `check` does."""
        if os.getpid() != self._process:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches it too, between jobs
        if stopping.times(self.written):
            return self._stop()
        self.check()
        own = _without_id(overrides)
        given = {"job": str(number), **dict(map(_key_value, own))}
        row = self._done(given)
        if row is None:
            swept = ["=".join(pair) for pair in map(_key_value, overrides) if pair[0] in keys]
            directory = self.root / _name(number, swept)
            sys.stdout.write(f"job {number}: {' '.join(swept) or 'nothing swept'} -> {directory}\n")
            sys.stdout.flush()
            row, stopped = self._run(
                given, directory, [*self.flags, *own, *found_by, "hydra.mode=RUN"], settings.devices
            )
            if row is not None:
                self.table.add(row)
            if stopped:
                return self._stop()
        return _compared(row, settings)

    def _stop(self) -> None:
        if os.getpid() == self._process:
            raise KeyboardInterrupt

    def _run(
        self, given: Row, directory: Path, words: Sequence[str], devices: Sequence[str] | None
    ) -> tuple[Row | None, bool]:
        """(its row, None when it was not started; whether the sweep was asked to stop)."""
        if _finished(directory):  # by a child that outlived its sweep
            return {**given, "status": OK, **_result(directory), "directory": str(directory)}, False
        reason = self.written / f".{given['job']}.reason"
        environment = {"FLOWRUN_RUN_DIR": str(directory), "FLOWRUN_SWEEP": self.run_id,
                       "FLOWRUN_RUN_ID": f"{self.run_id}-{given['job']}", REASON: str(reason)}  # fmt: skip
        self.written.mkdir(parents=True, exist_ok=True)
        with placed(devices, int(given["job"]), self.written) as place:
            if stopping.times(self.written):  # while it waited for a device
                return None, True
            began = time.monotonic()
            (code,), stopped = run_children(
                [Command(words, {**environment, **place.environment})], asked=partial(stopping.times, self.written)
            )
        row = {
            **given,
            "status": STATUS.get(code, "failed"),
            **({"device": place.device} if place.device else {}),
            "seconds": f"{time.monotonic() - began:.1f}",
            **_taken(reason),
            **_result(directory),
            "directory": str(directory) if directory.exists() else "",
        }
        return row, stopped

    def _done(self, given: Row) -> Row | None:
        """The row of a job that has ended well before. Raises ConfigError when its number was another job's."""
        row = next((row for row in self.table.rows() if row["job"] == given["job"]), None)
        if row is None:
            return None
        if any(row.get(name) != value for name, value in given.items()):
            raise self._another()
        if row["status"] != OK:
            return None
        sys.stdout.write(f"job {given['job']}: is done -> {row['directory']}\n")
        self.table.add(row)
        return row

    def finish(self) -> int:
        """Print the table and what it means, and remove what Hydra left when no job ran. Returns 1 when a job did not end well."""
        rows = self.table.rows() if self.table.as_of() != self._before else []
        if rows:
            sys.stdout.write("\n".join([printed(rows), *([] if self.dry else self._concluded(rows)), ""]))
        for left in (FILE, stopping.FILE):
            (self.written / left).unlink(missing_ok=True)
        if self.dry:
            shutil.rmtree(self.written)
        elif not rows:
            self._remove_litter()
        return int(any(row["status"] != OK for row in rows))

    def _concluded(self, rows: Sequence[Row]) -> list[str]:
        conclusion, picture = conclude(self.run_id, self.root, rows)
        missing = [row["job"] for row in rows if row["status"] != OK]
        again = [f"the same command with run_id={self.run_id} runs what has not ended well"] if missing else []
        return [*conclusion, *again, str(self.table.path), *([str(picture)] if picture else [])]

    def _remove_litter(self) -> None:
        if self.root not in self._new or not self.root.is_dir():
            return
        self._record.unlink(missing_ok=True)
        for folder in self._new:
            if not any(folder.iterdir()):
                folder.rmdir()


def _compared(row: Row, settings: SweepSettings) -> float | None:
    figure = figure_of([row], settings.figure, settings.best)
    return number(row[RESULT + figure.name]) if figure is not None and row["status"] == OK else None


def _without_id(overrides: Sequence[str]) -> list[str]:
    """run_id names the sweep, not the job."""
    return [text for text in overrides if not text.startswith(("run_id=", "hydra.", "hydra/"))]


def _key_value(text: str) -> tuple[str, str]:
    """Key, and value as one reads it: text without quotes and escapes."""
    override = OverridesParser.create().parse_override(text)
    value = override.value()
    return override.key_or_group, _read(value) if isinstance(value, list) else str(value)


def _read(value: object) -> str:
    """Lists and mappings as YAML and Hydra read them: [a,b], {name: a, params: {k: 1}}."""
    if isinstance(value, list):
        return f"[{','.join(map(_read, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_read(inner)}" for key, inner in value.items()) + "}"
    return str(value)


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
    return {f"{RESULT}reason": text}


def _finished(directory: Path) -> bool:
    """Whether a run there ended well, whatever the table says."""
    try:
        return json.loads((directory / FILE_OF_RESULT).read_text()).get("status") == "finished"
    except (FileNotFoundError, ValueError):
        return False


def _result(directory: Path) -> dict[str, str]:
    """The scalar values of the job's result.json, each under `result.<name>`."""
    file = directory / FILE_OF_RESULT
    if not file.exists():
        return {}
    result = {k: v for k, v in json.loads(file.read_text()).items() if k not in SAID}
    scalars = {k: v for k, v in result.items() if isinstance(v, str | int | float | bool)}
    return {f"{RESULT}{name}": str(value) for name, value in scalars.items()}
