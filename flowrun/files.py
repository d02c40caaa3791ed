"""Files that appear whole or not at all: temporary file, fsync, rename, fsync of the folder. No torch.

A temporary file is called `.<name>.<writer>.part`; a writer is <host>-<process>-<random>, so that no two ever choose one
name, and so that what a killed process left behind can be told from what a living one is working on.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import fsync, replace
from pathlib import Path
from typing import BinaryIO

HashFile = Callable[[Path], bytes]  # a file's content hash, remembered or not

BUFFER_BYTES = 1 << 20  # gathers small values into large writes; large ones pass by


@contextmanager
def appearing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears at `path` when the block ends without error. Its modes follow the umask.

    Whatever goes wrong, the partial file is removed and `path` is as it was; a kill leaves the old file or the new one."""
    part = path.with_name(f".{path.name}.{new_writer()}.part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(handle, "wb", buffering=BUFFER_BYTES) as file:
            yield file
            file.flush()
            fsync(file.fileno())
        replace(part, path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> Path:
    with appearing(path) as file:
        file.write(data)
    return path


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fsync(handle)
    finally:
        os.close(handle)


def missing(path: Path) -> str:
    """Empty when something is at `path`; else why it cannot be used: that it does not exist, or the system's reason."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:  # a zero byte in the name
        return f"is no path: {error}"
    return ""


def obstacle(folder: Path) -> str:
    """Why `folder` cannot be made or written to, as far as can be seen; empty when nothing is in the way."""
    places = (folder.absolute(), *folder.absolute().parents)
    existing = next(path for path in places if path.exists())
    if not existing.is_dir():
        return f"{existing} is no folder"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} may not be written to"


def this_host() -> str:
    return re.sub(r"[^a-z0-9]+", "_", socket.gethostname().lower()) or "host"


def new_writer() -> str:
    return f"{this_host()}-{os.getpid()}-{secrets.token_hex(6)}"
