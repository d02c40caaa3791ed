"""The directory that a run leaves behind: made after all checks, found again to resume, locked while a process uses it.

outputs/runs/<stage>/<task>-<model>/<run id>/   config.yaml, plan.txt, flowrun.log, result.json, lock, and what the stage adds
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from flowrun.config import ConfigError, Run
from flowrun.files import write_atomic
from flowrun.graph import seed_of

# What may differ between a run and its resumption: where, when and how it is watched, not what it computes.
NOT_IDENTITY = ("run_id", "resume", "dry_run", "processes", "tracker", "stage")


def outputs() -> Path:
    """Where results go: FLOWRUN_OUTPUTS, else `outputs` in the shell's directory. Absolute."""
    return Path(os.environ.get("FLOWRUN_OUTPUTS", "outputs")).absolute()


def identity(run: Run) -> str:
    """What a run computes, as one number: equal for a run and the command that resumes it."""
    plain = OmegaConf.to_container(OmegaConf.structured(run), enum_to_str=True)
    return f"{seed_of('run', json.dumps({k: v for k, v in plain.items() if k not in NOT_IDENTITY}, sort_keys=True)):016x}"


@dataclass
class RunDir:
    """An open run directory. `resumed`: it held an unfinished run of the same configuration."""

    path: Path
    resumed: bool = False
    _lock: TextIO | None = field(default=None, repr=False)

    def save_text(self, name: str, text: str) -> Path:
        return write_atomic(self.path / name, text.encode())

    def save_result(self, result: dict[str, Any]) -> Path:
        return self.save_text("result.json", json.dumps(result, indent=2) + "\n")

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


def find(run: Run, stage: str) -> Path | None:
    """The run that `resume` points at: a named directory, or the newest unfinished one of the same configuration
    that no live process holds, or None.

    Raises ConfigError when `resume` names a directory that is no run."""
    if run.resume == "none":
        return None
    if run.resume != "auto":
        named = Path(run.resume).absolute()
        if not (named / "config.yaml").is_file():
            raise ConfigError("resume", f"{named} holds no run", "give a run's directory, or auto, or none")
        return named
    new = place(run, stage)
    candidates = [new] if os.environ.get("FLOWRUN_RUN_DIR") else sorted(new.parent.glob("*"), reverse=True)
    return next((path for path in candidates if _unfinished(path, identity(run)) and not _held(path)), None)


def open_run(run: Run, stage: str, resume_from: Path | None) -> RunDir:
    """Make (or reopen) the directory, lock it and save the resolved configuration. Raises ConfigError when another
    process holds it or when it already holds a finished run."""
    path = resume_from or place(run, stage)
    if resume_from is None and (path / "result.json").exists():
        raise ConfigError("run_id", f"{path} already holds a run", "leave run_id out, or resume=DIR to go on with it")
    path.mkdir(parents=True, exist_ok=True)
    lock = _try_lock(path)
    if lock is None:
        raise ConfigError("resume", f"another process is using {path}", "wait for it, or start anew with resume=none")
    opened = RunDir(path, resumed=resume_from is not None, _lock=lock)
    opened.save_text("config.yaml", OmegaConf.to_yaml(OmegaConf.structured(run)))
    opened.save_text("identity", identity(run) + "\n")
    return opened


def _unfinished(path: Path, wanted: str) -> bool:
    stamp = path / "identity"
    return stamp.is_file() and stamp.read_text().strip() == wanted and read_result(path).get("status") != "finished"


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
