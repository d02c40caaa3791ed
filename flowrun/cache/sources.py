"""Content hashes of source files, remembered by (path, size, times of change, inode): a file is read once. No torch.

They lie in segments that are written once each and appear atomically; any number of processes may add some.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from flowrun.cache.key import KEY_BYTES, digest
from flowrun.cache.layout import SHARD_NAME, Layout
from flowrun.cache.tensorfile import Damaged, TensorFile, table, write_tensorfile
from flowrun.config import ConfigError, Verify
from flowrun.files import new_writer, sync_folder

FORMAT = "flowrun-cache-sources-1"
MOST_SEGMENTS = 16  # more are rewritten as one
SMALL = 1 << 20  # bytes; such files are read at once
CLOCK_TICK_NS = 20_000_000  # two changes closer than a file system's clock can tell apart leave the same time
MODEL_FILES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")  # weights, configuration, tokenizer
OLD_WEIGHTS = (".bin", ".pt")  # count where there are no safetensors
log = logging.getLogger(__name__)


class Sources:
    """Use it as a context, or call `save`: what was hashed anew is remembered for later processes then.

    verify=full reads every file again, once, whatever is remembered.
    """

    def __init__(self, root: Path, verify: Verify, reading: bool = True) -> None:
        """root: the cache's. reading: False reads no file, and gives those that are not remembered a hash of no content."""
        self.layout, self.verify, self.reading = Layout(Path(root)), verify, reading
        self.read = 0  # files whose content was read
        self._unread: set[int] = set()  # beginnings of the stamps of those that would have been, had `reading` been on
        self._known: dict[bytes, bytes] = {}
        self._new: dict[bytes, bytes] = {}
        self._segments = sorted(
            path for path in self.layout.sources.glob("*.safetensors") if SHARD_NAME.fullmatch(path.name)
        )
        if verify is not Verify.full:
            for file in sorted(self._files(), key=lambda file: int(file.metadata["created"])):  # later ones are right
                stamps, hashes = file.array("stamps").tobytes(), file.array("hashes").tobytes()
                starts = range(0, len(stamps), KEY_BYTES)
                self._known.update((stamps[at : at + KEY_BYTES], hashes[at : at + KEY_BYTES]) for at in starts)

    def hash_file(self, path: Path) -> bytes:
        """blake2b-128 of the file's content; of one that is not to be read, what no content has. Raises OSError."""
        path = Path(path).absolute()
        status = os.stat(path)
        key = _stamp(path, status)
        found = self._known.get(key)
        if found is None and not self.reading:
            self._unread.add(int.from_bytes(key[:7]))
            return digest("not read", key)
        if found is None:
            begun = time.time_ns()
            found = _content(path, status.st_size)
            self.read += 1
            if _marks(os.stat(path)) == _marks(status) and begun - status.st_ctime_ns > CLOCK_TICK_NS:
                self._known[key] = self._new[key] = found
        return found

    @property
    def unread(self) -> int:
        """Files that were asked for, are not remembered and were not read."""
        return len(self._unread)

    def save(self) -> None:
        """Remember the new hashes. Raises Failure when the disk is full."""
        if not self._new:
            return
        self.layout.create()
        merge = len(self._segments) >= MOST_SEGMENTS and self.verify is not Verify.full
        entries = self._known if merge else self._new
        arrays = [
            table(name, np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES))
            for name, keys in (("stamps", entries.keys()), ("hashes", entries.values()))
        ]
        path = self.layout.sources / f"{new_writer()}-00000.safetensors"
        write_tensorfile(path, FORMAT, arrays, {"created": str(time.time_ns())})
        if merge:
            for old in self._segments:
                old.unlink(missing_ok=True)
            sync_folder(self.layout.sources)
            self._segments = []
        self._segments.append(path)
        self._new = {}

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *error: object) -> None:
        self.save()

    def _files(self) -> Iterator[TensorFile]:
        for path in self._segments:
            try:
                yield TensorFile(path, FORMAT)
            except FileNotFoundError:  # another process rewrote the segments as one
                continue
            except Damaged as fault:
                log.warning("cache: %s; the files it remembered are read again", fault)


def _content(path: Path, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        if size <= SMALL:
            return hashlib.blake2b(file.read(), digest_size=KEY_BYTES).digest()
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=KEY_BYTES)).digest()


def _stamp(path: Path, status: os.stat_result) -> bytes:
    return digest("file", str(path), *_marks(status))


def _marks(status: os.stat_result) -> tuple[int, ...]:
    """What changes with a file. The time of change of the entry itself cannot be set back, as tools that unpack or copy
    files set the other one."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def folder_identity(folder: Path, hash_file: Callable[[Path], bytes]) -> bytes:
    """Identity of the model in `folder`: names and contents of its weights, configuration and tokenizer files.

    Raises ConfigError when there are no weights. Files of other kinds (read-me, pictures) and hidden ones do not count.
    """
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    weights = [path for path in files if path.suffix == ".safetensors"] or [
        path for path in files if path.suffix in OLD_WEIGHTS
    ]
    if not weights:
        raise ConfigError("model.weights", f"{folder} holds no weights", "name a folder with .safetensors files")
    counted = sorted({*weights, *(path for path in files if path.suffix in MODEL_FILES)})
    return digest("folder", [[path.relative_to(folder).as_posix(), hash_file(path)] for path in counted])
