"""The directory that a run leaves behind: made after all checks, found again to resume, locked while a process uses it.

outputs/runs/<stage>/<task>-<model>/<run id>/   config.yaml, plan.txt, flowrun.log, result.json, lock, and what the stage adds
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from flowrun.config import ConfigError, Run
from flowrun.disk import saving
from flowrun.files import write_atomic
from flowrun.graph import seed_of
from flowrun.outputs import CONFIG, STAMP, outputs

log = logging.getLogger(__name__)

# What may differ between a run and its resumption: where, when and how it is watched, not what it computes.
NOT_IDENTITY = ("run_id", "resume", "dry_run", "processes", "tracker", "stage", "multirun")


KEPT = (CONFIG, STAMP, "plan.txt", "result.json")  # what a refused resumption must not change


def identity(run: Run, data: str) -> str:
    """What a run computes, as one number: equal for a run and the command that resumes it. data: a stamp of its rows."""
    plain = OmegaConf.to_container(OmegaConf.structured(run), enum_to_str=True)
    text = json.dumps({k: v for k, v in plain.items() if k not in NOT_IDENTITY}, sort_keys=True)
    return f"{seed_of('run', text, data):016x}"


@dataclass
class RunDir:
    """An open run directory. `resumed`: it held an unfinished run of the same configuration."""

    path: Path
    resumed: bool = False
    _lock: TextIO | None = field(default=None, repr=False)
    _before: dict[str, bytes] = field(default_factory=dict, repr=False)

    def save_text(self, name: str, text: str) -> Path:
        """Raises Failure when the disk is full."""
        with saving(self.path, name):
            return write_atomic(self.path / name, text.encode())

    def save_result(self, result: dict[str, Any]) -> Path:
        return self.save_text("result.json", json.dumps(result, indent=2) + "\n")

    def undo(self) -> None:
        """After a refusal: a resumed run's files are as they were."""
        for name, content in self._before.items():
            write_atomic(self.path / name, content)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def read_result(path: Path) -> dict[str, Any]:
    """The run's result.json; an empty mapping when there is none or a kill cut it short."""
    try:
        return json.loads((path / "result.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def place(run: Run, stage: str) -> Path:
    """Directory of a new run. A sweep's child is told its own through FLOWRUN_RUN_DIR."""
    given = os.environ.get("FLOWRUN_RUN_DIR")
    if given:
        return Path(given).absolute() / stage if run.stage is None and stage == "cache" else Path(given).absolute()
    return outputs() / "runs" / stage / f"{run.task['name']}-{run.model['name']}" / run.run_id


def find(run: Run, stage: str, data: str) -> Path | None:
    """The run that `resume` points at: a named directory, or the newest unfinished one of the same configuration and
    data that no live process holds, or None.

    Raises ConfigError when `resume` names a directory that is no run."""
    if run.resume == "none":
        return None
    if run.resume != "auto":
        return named(run)
    new = place(run, stage)
    stamps = [new / STAMP] if os.environ.get("FLOWRUN_RUN_DIR") else new.parent.glob(f"*/{STAMP}")
    newest_first = sorted((stamp for stamp in stamps if stamp.is_file()), key=lambda stamp: -stamp.stat().st_mtime_ns)
    return next(
        (stamp.parent for stamp in newest_first if _unfinished(stamp, identity(run, data)) and not _held(stamp.parent)), None
    )


def named(run: Run) -> Path | None:
    """The directory that `resume` names, None for auto and none. Raises ConfigError when it is no training run's."""
    if run.resume in ("auto", "none"):
        return None
    path = Path(run.resume).absolute()
    if not (path / CONFIG).is_file() or read_result(path).get("stage") == "cache":
        raise ConfigError("resume", f"{path} holds no training run", "give a train run's directory, or auto, or none")
    return path


def open_run(run: Run, stage: str, resume_from: Path | None, data: str) -> RunDir:
    """Make (or reopen) the directory, lock it and save the resolved configuration. Raises ConfigError when another
    process holds it or when it already holds a finished run."""
    path = resume_from or place(run, stage)
    again = (path / STAMP).exists() and _unfinished(path / STAMP, identity(run, data))  # a sweep's, stopped in this stage
    if resume_from is None and (path / "result.json").exists() and not (again and run.resume == "auto"):
        raise ConfigError("run_id", f"{path} already holds a run", "leave run_id out, or resume=DIR to go on with it")
    with saving(path, CONFIG):
        path.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(path)
    if lock is None:
        raise ConfigError("resume", f"another process is using {path}", "wait for it, or start anew with resume=none")
    kept = [path / name for name in KEPT if resume_from is not None and (path / name).is_file()]
    opened = RunDir(path, resumed=resume_from is not None, _lock=lock,
                    _before={file.name: file.read_bytes() for file in kept})  # fmt: skip
    config, text = path / CONFIG, OmegaConf.to_yaml(OmegaConf.structured(run))
    if config.exists() and identity(run, data) != (path / STAMP).read_text().strip():
        log.warning("%s was a run of another configuration or of other data; it goes on with these", path)
        os.replace(config, path / f"config-before-{run.run_id}.yaml")
    opened.save_text(CONFIG, text)
    opened.save_text(STAMP, identity(run, data) + "\n")
    return opened


def _unfinished(stamp: Path, wanted: str) -> bool:
    return stamp.read_text().strip() == wanted and read_result(stamp.parent).get("status") != "finished"


def _held(path: Path) -> bool:
    lock = _try_lock(path)
    if lock is None:
        return True
    lock.close()
    return False


def _try_lock(path: Path) -> TextIO | None:
    """An exclusive lock that the kernel drops when the process ends, however it ends; None if another holds it."""
    handle = open(path / "lock", "a+")  # noqa: SIM115 - held for the life of the run
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle
