"""What a run goes on from: `step-N/` folders that are there whole or not at all.

step-000500/  <group>.safetensors per group of tensors, plain.json, manifest.json (sizes and checksums; written last)

A folder is made under another name, written to disk, and renamed; only then older ones go. A folder whose manifest is
not ours is never removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrun.disk import check_room, saving

log = logging.getLogger(__name__)

FORMAT = "flowrun-checkpoint-1"
MANIFEST, PLAIN = "manifest.json", "plain.json"
SPARE_BYTES = 1 << 20  # headers, JSON, the file system's own


@dataclass(frozen=True)
class Checkpoint:
    """tensors: group -> name -> tensor, on the CPU. plain: JSON data."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    plain: dict[str, Any]


class Checkpoints:
    """The checkpoints in `directory`, of which the newest `keep` stay. Used by the main process alone."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep
        self._damaged: set[int] = set()

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], plain: Mapping[str, Any]) -> Path:
        """Save one checkpoint, then drop those beyond `keep` and damaged ones that `newest` met. Groups are file names;
        tensors may be on any device.

        Raises Failure when the disk is or gets full; earlier ones are then untouched and no partial one is left."""
        self.directory.mkdir(parents=True, exist_ok=True)
        what, part = f"the checkpoint of step {step}", self.directory / f".step-{step:06d}.part"
        size = sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
        check_room(self.directory, size + SPARE_BYTES, what)
        for stale in self.directory.glob(".step-*.part"):  # of a process that was killed
            shutil.rmtree(stale)
        try:
            with saving(self.directory, what):
                part.mkdir()
                for name, group in tensors.items():
                    on_cpu = {key: t.detach().cpu().contiguous() for key, t in group.items()}
                    save_file(on_cpu, part / f"{name}.safetensors")
                (part / PLAIN).write_text(json.dumps(plain))
                self._finish(part, step)
                path = self._rename(part, step)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._drop(step)
        return path

    def newest(self) -> Checkpoint | None:
        """The newest complete one whose checksums hold, or None. Damaged ones are skipped, with a warning."""
        step = self.newest_step()
        return None if step is None else self.load(step)

    def newest_step(self) -> int | None:
        """The step of `newest`; reads every byte of it for the checksums."""
        for step in self._steps():
            fault = _fault(self._path(step))
            if fault is None:
                return step
            log.warning("checkpoint %s is damaged (%s) and is skipped", self._path(step), fault)
            self._damaged.add(step)
        return None

    def load(self, step: int) -> Checkpoint:
        path = self._path(step)
        # Cloned: tensors mapped from a file may be misaligned, which changes a computation's last bits.
        tensors = {file.stem: {key: tensor.clone() for key, tensor in load_file(file).items()}
                   for file in sorted(path.glob("*.safetensors"))}
        return Checkpoint(step, tensors, json.loads((path / PLAIN).read_text()))

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def _steps(self) -> list[int]:
        """Steps of all folders with such a name, newest first, damaged or not."""
        names = [re.fullmatch(r"step-(\d{6,})", path.name) for path in self.directory.glob("step-*")]
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def _drop(self, saved: int) -> None:
        self._damaged.discard(saved)
        good = [step for step in self._steps() if step <= saved and step not in self._damaged]
        for step in (*good[self.keep:], *self._damaged):
            if _is_ours(self._path(step)):
                shutil.rmtree(self._path(step))
        self._damaged.clear()

    def _finish(self, part: Path, step: int) -> None:
        files = {file.name: {"bytes": file.stat().st_size, "blake2b": _digest(file)} for file in sorted(part.iterdir())}
        for name in files:
            _sync(part / name)
        (part / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
        _sync(part / MANIFEST)
        _sync(part)

    def _rename(self, part: Path, step: int) -> Path:
        path, aside = self._path(step), self.directory / f"step-{step:06d}.old"
        if _is_ours(aside):
            shutil.rmtree(aside)
        if path.exists():  # damaged, or somebody else's
            os.replace(path, aside)
        os.replace(part, path)
        _sync(self.directory)
        if _is_ours(aside):
            shutil.rmtree(aside)
        elif aside.exists():
            log.warning("%s held something else than a checkpoint of this program; it is now %s", path, aside)
        return path


def _is_ours(path: Path) -> bool:
    try:
        return json.loads((path / MANIFEST).read_text())["format"].startswith(FORMAT.rstrip("0123456789"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        for name, wanted in manifest["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != wanted["bytes"] or _digest(file) != wanted["blake2b"]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def _digest(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    """Ask the disk, not only the system, to have it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
