"""Sizes of pictures that were found sound, remembered: a picture is looked at once. No torch."""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from flowrun.cache.layout import Layout
from flowrun.cache.segments import Segments, stamp

FORMAT = "flowrun-cache-looks-1"
FACT = struct.Struct("<II?")  # height, width, whether every pixel was decoded
Size = tuple[int, int]  # (height, width)


class Ticket(NamedTuple):
    """A file as it is before it is looked at. begun: when that was, in ns since 1970."""

    path: str
    status: os.stat_result
    stamp: bytes
    begun: int


class Looks:
    """Call `save` at the end."""

    def __init__(self, root: Path, remembering: bool = True) -> None:
        """root: the cache's. remembering: False looks at every picture again."""
        layout = Layout(Path(root))
        self._sizes = Segments(layout, layout.looks, FORMAT, "sizes", FACT.size, remembering)

    def ticket(self, path: Path, *more: Any) -> Ticket:
        """more: which part of the file it is, and all by which the same bytes might be seen otherwise another time.

        Raises OSError, and ValueError for what can be no path."""
        name = os.path.abspath(path)
        status = os.stat(name)
        return Ticket(name, status, stamp(name, status, *more), time.time_ns())

    def find(self, ticket: Ticket, full: bool) -> Size | None:
        """Of a picture that is as it was when it was found sound. full: whether it has to have been decoded to its end."""
        fact = self._sizes.find(ticket.stamp)
        if fact is None:
            return None
        height, width, decoded = FACT.unpack(fact)
        return (height, width) if decoded or not full else None

    def add(self, ticket: Ticket, full: bool, size: Size) -> None:
        with suppress(OSError):  # it went since: whoever reads it says so
            self._sizes.add(ticket.stamp, FACT.pack(*size, full), ticket.path, ticket.status, ticket.begun)

    def __len__(self) -> int:
        """Pictures that are known."""
        return len(self._sizes)

    def save(self) -> None:
        """Raises Failure when the disk is full."""
        self._sizes.save()
