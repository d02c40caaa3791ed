"""Facts about files, known by what changes with a file, so that a file is looked at once. No torch.

They lie in segments that are written once each and appear atomically; any number of processes may add some.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flowrun.cache.key import KEY_BYTES, digest
from flowrun.cache.layout import SHARD_NAME, Layout
from flowrun.cache.tensorfile import Damaged, OtherFormat, TensorFile, table, write_tensorfile
from flowrun.files import new_writer, sync_folder

MOST_SEGMENTS = 16  # more are rewritten as one
CLOCK_TICK_NS = 20_000_000  # two changes closer than a file system's clock can tell apart leave the same time
log = logging.getLogger(__name__)


class Segments:
    """Stamp of a file -> a fact of `width` bytes. stamps, facts of a segment: [N, 16] and [N, width] uint8."""

    def __init__(self, layout: Layout, folder: Path, form: str, name: str, width: int, remembering: bool = True) -> None:
        """form: the segments' format. name: of their table of facts. remembering: False passes over what is there."""
        self.layout, self.folder, self.form, self.name, self.width = layout, folder, form, name, width
        self.remembering = remembering
        self._known: dict[bytes, bytes] = {}
        self._new: dict[bytes, bytes] = {}
        self._damaged = False
        self._paths = sorted(path for path in folder.glob("*.safetensors") if SHARD_NAME.fullmatch(path.name))
        if remembering:
            for file in sorted(self._files(), key=lambda file: int(file.metadata["created"])):  # later ones are right
                stamps, facts = _cut(file.array("stamps"), KEY_BYTES), _cut(file.array(name), width)
                self._known.update(zip(stamps, facts, strict=True))

    def __len__(self) -> int:
        return len(self._known)

    def find(self, stamp: bytes) -> bytes | None:
        return self._known.get(stamp)

    def add(self, stamp: bytes, fact: bytes, path: str | Path, status: os.stat_result, begun: int) -> None:
        """Remember a fact, unless the file may have changed meanwhile. status: of the time, in ns, when looking began."""
        if marks(os.stat(path)) == marks(status) and begun - status.st_ctime_ns > CLOCK_TICK_NS:
            self._known[stamp] = self._new[stamp] = fact

    def save(self) -> None:
        """Write the new facts, where that is allowed. Raises Failure when the disk is full."""
        if not self._new and not self._damaged:
            return
        try:
            self._save()
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            log.warning("cache: %s: %s; what was read now is read again next time", error.filename or self.folder, error.strerror)

    def _save(self) -> None:
        self.layout.create()
        merge = self.remembering and (self._damaged or len(self._paths) >= MOST_SEGMENTS)
        entries = self._known if merge else self._new
        arrays = [
            table(name, np.frombuffer(b"".join(bytes_), np.uint8).reshape(-1, width))
            for name, bytes_, width in (("stamps", entries.keys(), KEY_BYTES), (self.name, entries.values(), self.width))
        ]
        path = self.folder / f"{new_writer()}-00000.safetensors"
        write_tensorfile(path, self.form, arrays, {"created": str(time.time_ns())})
        if merge:
            for old in self._paths:
                old.unlink(missing_ok=True)
            sync_folder(self.folder)
            self._paths = []
        self._paths.append(path)
        self._new, self._damaged = {}, False

    def _files(self) -> Iterator[TensorFile]:
        """Those that can be read; `_paths` keeps these and the damaged ones, and all others are left alone."""
        paths, self._paths = self._paths, []
        for path in paths:
            try:
                file = TensorFile(path, self.form)
            except FileNotFoundError:  # another process rewrote the segments as one
                continue
            except PermissionError as error:  # another user's
                log.warning("cache: %s: %s; the files it remembers are read again", path, error.strerror)
                continue
            except OtherFormat:  # a later program's
                continue
            except Damaged as fault:
                self._damaged = True
                log.warning("cache: %s; the files it remembered are read again", fault)
            else:
                yield file
            self._paths.append(path)


def stamp(path: str, status: os.stat_result, *more: Any) -> bytes:
    """Of the file as it is, and of whatever else tells one fact from another. path: absolute."""
    return digest("file", path, *marks(status), *more)


def marks(status: os.stat_result) -> tuple[int, ...]:
    """What changes with a file. The time of change of the entry itself cannot be set back, as tools that unpack or copy
    files set the other one."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _cut(rows: np.ndarray, width: int) -> list[bytes]:
    joined = rows.tobytes()
    return [joined[at : at + width] for at in range(0, len(joined), width)]
