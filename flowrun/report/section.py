"""A part of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Picture:
    """source: a data: address, so that the page needs no file."""

    source: str
    caption: str


@dataclass(frozen=True)
class Folded:
    title: str
    text: str


@dataclass(frozen=True)
class Section:
    """rows: the first one holds the columns' names. legend: colours and names of the lines in `drawings`, which are <svg> elements."""

    title: str
    note: str = ""
    rows: Sequence[Sequence[str]] = ()
    text: str = ""
    legend: Sequence[tuple[str, str]] = ()
    drawings: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    folded: Sequence[Folded] = ()

    @property
    def holds(self) -> bool:
        """Whether there is anything to show."""
        return any(getattr(self, field.name) for field in fields(self) if field.name != "title")
