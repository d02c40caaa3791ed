"""Files inside other files: a member of a tar archive, a value of an Arrow table. Read in place, never unpacked."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flowrun.cache.key import digest
from flowrun.files import HashFile, missing


@dataclass(frozen=True, slots=True)
class Member:
    """`size` bytes from `offset` of the file `path`; name: what it is called in there."""

    path: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.path}/{self.name}"

    def open(self) -> BinaryIO:
        return io.BufferedReader(_Window(self.path, self.offset, self.size))

    def read_from(self, file: BinaryIO) -> bytes:
        """All of it. file: `path`, open: many small members cost little then."""
        file.seek(self.offset)
        return file.read(self.size)


File = Path | Member


def open_file(file: File) -> BinaryIO:
    return open(file, "rb") if isinstance(file, Path) else file.open()


def size_of(file: File) -> int:
    return file.stat().st_size if isinstance(file, Path) else file.size


def absence(file: File) -> str:
    """Why it is not there, as `flowrun.files.missing`; empty when it is."""
    return missing(file) if isinstance(file, Path) else ""


def content(file: File, hash_file: HashFile) -> bytes:
    """A key of its bytes; that of a member is known by its archive's, so that nothing is read twice."""
    return hash_file(file) if isinstance(file, Path) else digest("member", hash_file(file.path), file.offset, file.size)


class _Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._at = open(path, "rb", buffering=0), offset, size, 0  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(memoryview(buffer)[:count])
        self._at += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()
