r"""Captions: what a text becomes, and the files beside the pictures, `a/b.txt` or `a/b.json` for `a/b.jpg`.

Text is UTF-8, with or without a byte order mark; it counts without white space at its ends, each line break as \n.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

BOM = b"\xef\xbb\xbf"
SURROGATE = re.compile("[\ud800-\udfff]")


class Kind(Enum):
    txt = "txt"
    json = "json"


class Lines(Enum):
    whole = "whole"  # the text with its line breaks is the caption
    first = "first"  # its first line is
    each = "each"  # each line is a caption of its own


@dataclass(kw_only=True, slots=True)
class Caption:
    file: Kind
    field: str  # json only
    lines: Lines

    @property
    def ending(self) -> str:
        return f".{self.file.value}"


class CaptionFault(Exception):
    """A caption cannot be used; the message names the caption file where there is one."""


def read_captions(path: str, rule: Caption, near: Callable[[Path], list[str]]) -> list[str]:
    """The captions in a file, at least one. near: names of files that may have been meant, for a missing caption file.

    Raises CaptionFault: no such file, not UTF-8 (with the byte's position), no such field, or empty."""
    name = os.path.basename(path)
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read()
    except FileNotFoundError:
        instead = ", ".join(near(Path(path)))
        raise CaptionFault(f"has no caption file {name}" + (f", but there is {instead}" if instead else "")) from None
    except OSError as error:
        raise CaptionFault(f"its caption file {name} cannot be read: {error.strerror}") from error
    return captions_in(data, rule, name)


def captions_in(data: bytes, rule: Caption, name: str) -> list[str]:
    """The captions that a file of this content holds. Raises CaptionFault."""
    try:
        text = decoded(data)
    except ValueError as error:
        raise CaptionFault(f"its caption file {name} is not UTF-8: {error}") from error
    try:
        return captions(text if rule.file is Kind.txt else _in_json(text, rule.field), rule.lines)
    except ValueError as error:
        raise CaptionFault(f"its caption file {name} {error}") from error


def captions(value: Any, lines: Lines) -> list[str]:
    """A text, or a list of texts, as captions without repetition. Raises ValueError when it is neither or empty."""
    texts = value if isinstance(value, list) else [value]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"holds {reprlib.repr(wrong[0])} where a text is needed")
    if broken := [text for text in texts if SURROGATE.search(text)]:
        raise ValueError(f"is no text: {broken[0][:40]!a} holds half of a surrogate pair")
    found = [text.replace("\r\n", "\n").replace("\r", "\n").strip() for text in texts]
    if lines is Lines.first:
        found = [text.partition("\n")[0].strip() for text in found]
    elif lines is Lines.each:
        found = [line.strip() for text in found for line in text.splitlines()]
    if not any(found):
        raise ValueError("is empty")
    return list(dict.fromkeys(filter(None, found)))


def decoded(data: bytes) -> str:
    """UTF-8, a byte order mark removed. Raises ValueError: which byte, where, and what the encoding may be."""
    offset = len(BOM) if data.startswith(BOM) else 0
    try:
        return data[offset:].decode("utf-8")
    except UnicodeDecodeError as error:
        position = error.start + offset
        raise ValueError(f"byte {data[position]:#04x} at position {position} ({_encoding(data)})") from error


def parsed(text: str) -> Any:
    """JSON with numbers as the text that stands there. Raises ValueError with line and column, or the name that stands twice."""
    try:
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no valid JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for two values of one name, of which only the last would count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has the name {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return found


def _in_json(text: str, field: str) -> Any:
    content = parsed(text)
    if not isinstance(content, dict) or field not in content:
        there = f"its fields are {', '.join(content)}" if isinstance(content, dict) else "it is no object"
        raise ValueError(f"has no field {field!r}: {there}; data.caption.field names it")
    return content[field]


def _encoding(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it starts like UTF-16; save it as UTF-8"
    try:
        data.decode("cp1252")
    except UnicodeDecodeError:
        return "save it as UTF-8"
    return "it may be Windows-1252; save it as UTF-8"
