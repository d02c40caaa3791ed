"""A full disk while saving: found before it happens where possible, and named where not. No torch."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from flowrun.config import Failure

FULL = (errno.ENOSPC, errno.EDQUOT)


def check_room(directory: Path, needed: int, what: str) -> None:
    """Raises Failure when the disk of `directory`, which need not be there yet, has fewer than `needed` bytes free."""
    free = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free
    if free < needed:
        raise Failure(f"{what} needs {needed / 1e6:.1f} MB, but {directory} has {free / 1e6:.1f} MB free", _remedy())


@contextmanager
def saving(directory: Path, what: str) -> Iterator[None]:
    """Turns "no space left" (also as safetensors words it) inside the block into a Failure; other errors pass."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors' writer is Rust and carries the number in its text only.
        codes = [error.errno] if isinstance(error, OSError) else [n for n in FULL if f"os error {n}" in str(error)]
        if not set(codes) & set(FULL):
            raise
        raise Failure(f"the disk was full while saving {what} to {directory}", _remedy()) from error


def _remedy() -> str:
    return "free some space or set FLOWRUN_OUTPUTS to another disk; what was saved before is untouched"
