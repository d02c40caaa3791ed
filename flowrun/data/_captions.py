"""Captions in text files beside the pictures: `a/b.jpg` is described by `a/b.txt`.

The whole text counts, line breaks included, without white space at its ends and without a byte order mark.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

BOM = b"\xef\xbb\xbf"


class CaptionFault(Exception):
    """A caption cannot be used; the message names the caption file where there is one."""


def read_caption(picture: Path, near: Callable[[Path], list[str]]) -> str:
    """The picture's caption. near: names of files that may have been meant, given the path of a missing caption file.

    Raises CaptionFault: no such file, not UTF-8 (with the byte's position), or empty."""
    path = picture.with_suffix(".txt")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        instead = ", ".join(near(path))
        raise CaptionFault(
            f"has no caption file {path.name}" + (f", but there is {instead}" if instead else "")
        ) from None
    except OSError as error:
        raise CaptionFault(f"its caption file {path.name} cannot be read: {error.strerror}") from error
    offset = len(BOM) if data.startswith(BOM) else 0
    try:
        text = data[offset:].decode("utf-8").strip()
    except UnicodeDecodeError as error:
        position = error.start + offset
        what = f"its caption file {path.name} is not UTF-8: byte {data[position]:#04x} at position {position}"
        raise CaptionFault(f"{what} ({_encoding(data)})") from error
    if not text:
        raise CaptionFault(f"its caption file {path.name} is empty")
    return text


def _encoding(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it starts like UTF-16; save it as UTF-8"
    try:
        data.decode("cp1252")
    except UnicodeDecodeError:
        return "save it as UTF-8"
    return "it may be Windows-1252; save it as UTF-8"
