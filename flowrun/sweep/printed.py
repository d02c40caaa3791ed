"""What is shown of a sweep's table. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flowrun.sweep.settings import accelerators, is_group
from flowrun.sweep.table import RESULT, Row, columns, differs

ALWAYS = ("job", "status", "seconds")  # columns that stand there in any case
UNPRINTED = ("directory", f"{RESULT}seconds")  # the first is told as jobs start, the second is nearly the job's own
COUNTS = ("/skipped", "/hits")  # ends of names with a slash that are printed; others are parts of figures
REASON = f"{RESULT}reason"
WIDEST = 40  # characters of a cell; sweep.csv holds all of it


def printed(rows: Sequence[Row]) -> str:
    """The table for a terminal."""
    lines = [[_short(cell) for cell in line] for line in telling(rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def telling(rows: Sequence[Row]) -> list[list[str]]:
    """The columns in which jobs differ, without the parts that figures are made of: their names, and the cells of each job."""
    names = [name for name in columns(rows) if name in ALWAYS or _is_printed(rows, name)]
    return [[name.removeprefix(RESULT) for name in names], *([told(row, name) for name in names] for row in rows)]


def _is_printed(rows: Sequence[Row], name: str) -> bool:
    """Of results those that differ between the jobs that have them, and what one alone has."""
    if name in UNPRINTED:
        return False
    if not name.startswith(RESULT):
        return len(rows) == 1 or differs(rows, name)
    values = [row[name] for row in rows if row.get(name)]
    if name == REASON or name.endswith(COUNTS):
        return bool(values)
    return "/" not in name and (len(values) == 1 or len(set(values)) > 1)


def told(row: Row, name: str) -> str:
    """A cell as one reads it."""
    value = row.get(name) or ""
    return f"[{', '.join(accelerators(value))}]" if value and is_group(name) else value


def _short(cell: str) -> str:
    """Six digits of a long number, the beginning of a long text."""
    if re.fullmatch(r"-?\d+\.\d{6,}(e-?\d+)?", cell):
        return f"{float(cell):.6g}"
    return cell if len(cell) <= WIDEST else cell[: WIDEST - 1] + "…"
