"""What a run is going to do, in words: printed before anything expensive starts, and saved with the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowrun.config import Stage
from flowrun.graph import Param, Unit
from flowrun.graph.unit import param_name
from flowrun.splitters import Split

NAMED = 3  # rows in a line


@dataclass
class Plan:
    """Sections of (title, lines), in reading order."""

    title: str
    sections: list[tuple[str, list[str]]] = field(default_factory=list)

    def add(self, title: str, lines: Sequence[str]) -> None:
        self.sections.append((title, list(lines)))

    def __str__(self) -> str:
        return "\n".join([self.title, *(section(title, lines) for title, lines in self.sections)])


def section(title: str, lines: Sequence[str]) -> str:
    head, *rest = lines or ["-"]
    return "\n".join([f"{title:<12}{head}", *(" " * 12 + line for line in rest)])


def unit_table(split: Split) -> list[str]:
    """unit, reads, writes, models, stage, why: one line per unit."""
    rows = [("unit", "reads", "writes", "models", "stage", "why")]
    for i, unit in enumerate(split.units):
        stage = Stage.train.value if i in split.live else Stage.cache.value if i in split.needed else "-"
        reads, writes = ("everything", "everything") if unit.is_barrier else (_names(unit.reads), _names(unit.writes))
        rows.append(
            (
                unit.name,
                reads,
                writes,
                ", ".join(unit.onload_model_names) or "-",
                stage,
                split.why[i] + _kept(split, i, unit),
            )
        )
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text in columns as wide as their widest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def pixels(shape: tuple[int, ...]) -> str:
    """(height, width) or (frames, height, width), as people say it, width first: 17 frames of 64x32 pixels."""
    *frames, height, width = shape
    return f"{f'{frames[0]} frames of ' if frames else ''}{width}x{height} pixels"


def names(rows: Sequence[str]) -> str:
    """The first few."""
    return ", ".join(rows[:NAMED]) + (", ..." if len(rows) > NAMED else "")


def amount(count: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _names(params: frozenset[Param]) -> str:
    return ", ".join(map(param_name, sorted(params))) or "-"


def _kept(split: Split, i: int, unit: Unit) -> str:
    """Outputs of a cached unit that are not stored, since nothing reads them."""
    dropped = unit.writes - set(split.kept.get(i, ())) if i in split.needed and not unit.is_barrier else frozenset()
    return f"; not stored: {_names(dropped)}" if dropped else ""
