"""Files that appear whole or not at all: temporary file, fsync, rename, fsync of the folder. No torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import fsync, replace
from pathlib import Path
from typing import BinaryIO

from flowrun.cache.layout import new_writer
from flowrun.config import Failure

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
BUFFER_BYTES = 1 << 20  # gathers small values into large writes; large ones pass by


@contextmanager
def appearing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears at `path` when the block ends without error. Its modes follow the umask.

    Raises Failure when the disk is full; whatever goes wrong, the partial file is removed and `path` is as it was.
    """
    part = path.with_name(f".{path.name}.{new_writer()}.part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(handle, "wb", buffering=BUFFER_BYTES) as file:
            yield file
            file.flush()
            fsync(file.fileno())
        replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise Failure(
                f"no space is left on the disk while writing {path}",
                "what was written before is kept: free some space and run the same command again",
            ) from error
        raise
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fsync(handle)
    finally:
        os.close(handle)
