"""Content hashes of source files, remembered: a file is read once. No torch."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from flowrun.cache.key import KEY_BYTES, digest
from flowrun.cache.layout import Layout
from flowrun.cache.segments import Segments, stamp
from flowrun.config import ConfigError, Verify

FORMAT = "flowrun-cache-sources-1"
SMALL = 1 << 20  # bytes; such files are read at once
MODEL_FILES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")  # weights, configuration, tokenizer
OLD_WEIGHTS = (".bin", ".pt")  # count where there are no safetensors


class Sources:
    """Use it as a context, or call `save`: what was hashed anew is remembered for later processes then.

    verify=full reads every file again, once, whatever is remembered.
    """

    def __init__(self, root: Path, verify: Verify, reading: bool = True) -> None:
        """root: the cache's. reading: False reads no file, and gives those that are not remembered a hash of no content."""
        layout = Layout(Path(root))
        self.reading = reading
        self.read = 0  # files whose content was read
        self._unread: set[int] = set()  # beginnings of the keys of those that would have been, had `reading` been on
        self._hashes = Segments(layout, layout.sources, FORMAT, "hashes", KEY_BYTES, verify is not Verify.full)

    def hash_file(self, path: Path) -> bytes:
        """blake2b-128 of the file's content; of one that is not to be read, what no content has. Raises OSError."""
        name = os.path.abspath(path)
        if not self.reading and not len(self._hashes):  # none is remembered
            return self._not_read(name)
        status = os.stat(name)
        key = stamp(name, status)
        found = self._hashes.find(key)
        if found is None and not self.reading:
            return self._not_read(key)
        if found is None:
            begun = time.time_ns()
            found = _content(name, status.st_size)
            self.read += 1
            self._hashes.add(key, found, name, status, begun)
        return found

    def _not_read(self, file: str | bytes) -> bytes:
        """file: its name, or its stamp where there is one."""
        key = digest("not read", file)
        self._unread.add(int.from_bytes(key[:7]))
        return key

    @property
    def unread(self) -> int:
        """Files that were asked for, are not remembered and were not read."""
        return len(self._unread)

    def save(self) -> None:
        """Remember the new hashes. Raises Failure when the disk is full."""
        self._hashes.save()

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *error: object) -> None:
        self.save()


def _content(path: str, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        if size <= SMALL:
            return hashlib.blake2b(file.read(), digest_size=KEY_BYTES).digest()
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=KEY_BYTES)).digest()


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
