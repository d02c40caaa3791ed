"""Prompts without pictures, for tasks that make their own: a text file with one a line, or a table's column."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrun.cache.key import digest
from flowrun.config import ConfigError, DataError
from flowrun.data import Row, Source
from flowrun.data._captions import Lines, captions, decoded
from flowrun.data._pictures import ID_HEX, OnError
from flowrun.data._tables import Line, read_table, table_file
from flowrun.files import HashFile, missing
from flowrun.spelling import suggest

log = logging.getLogger(__name__)

TEXT = ".txt"


@dataclass(kw_only=True, slots=True)
class Columns:
    id: str | None
    caption: str
    height: str | None
    width: str | None

    def __post_init__(self) -> None:
        if (self.height is None) != (self.width is None):
            lacking = "height" if self.height is None else "width"
            raise ConfigError(f"data.columns.{lacking}", "is null while the other side has a column", "name both, or neither")

    def check(self, table: str, there: Collection[str]) -> None:
        """Raises ConfigError for a column that is not there at all."""
        for name in ("id", "caption", "height", "width"):
            column = getattr(self, name)
            if column is not None and column not in there:
                what = f"{table} has no column {column!r}, only {', '.join(there)}"
                raise ConfigError(f"data.columns.{name}", what, suggest(column, there))


class Prompts(Source):
    """Rows named by `columns.id`, else by a hash of the prompt; `size` is that of the pictures to sample."""

    names = ("prompt",)

    @dataclass(kw_only=True, slots=True)
    class Config:
        source: str
        path: str | None
        columns: Columns  # of a table; a text file has none
        size: list[int]  # [height, width] in pixels, of rows that no column gives one
        on_error: OnError

        def __post_init__(self) -> None:
            if len(self.size) != 2 or min(self.size) < 1:
                raise ConfigError("data.size", f"is {self.size}", "give [height, width] in pixels")

    def rows(self) -> list[Row]:
        path = table_file(self.config.path)
        lines = _text_lines(path) if path.suffix.lower() == TEXT else read_table(path, "id", self.config.columns.caption)
        if there := list(dict.fromkeys(name for line in lines for name in line.values)):
            self._columns(path).check(path.name, there)
        rows: dict[str, Row] = {}
        seen, faults = {}, []
        for line in lines:
            try:
                for row in self._read(path, line):
                    if row.id in rows:
                        what = "its prompt" if self._columns(path).id is None else f"its name {row.id!r}"
                        raise ValueError(f"{what} stands in {seen[row.id]} already")
                    rows[row.id], seen[row.id] = row, _short(path, line)
            except ValueError as error:
                faults.append((line, str(error)))
        self._settle(path, rows, faults)
        return list(rows.values())

    def place(self) -> str:
        return "" if self.config.path is None else str(Path(self.config.path).expanduser().resolve())

    def gone(self) -> bool:
        return self.config.path is not None and missing(Path(self.place())) == "does not exist"

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        return {"prompt": row.prompt} if names is None or "prompt" in names else {}

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        return {"prompt": digest("prompt", row.prompt)}

    def _columns(self, path: Path) -> Columns:
        """A text file has prompts and nothing else."""
        return Columns(id=None, caption="prompt", height=None, width=None) if path.suffix.lower() == TEXT else self.config.columns

    def _read(self, path: Path, line: Line) -> Iterator[Row]:
        """The row of a line, or one for each of several prompts in it. Raises ValueError."""
        if line.fault:
            raise ValueError(line.fault)
        columns = self._columns(path)
        size, named = self._size(columns, line.values), line.values.get(columns.id) if columns.id is not None else ""
        if not isinstance(named, str) or (columns.id is not None and not named.strip()):
            raise ValueError(f"{columns.id} is {named!r} where a text is needed")
        try:
            found = captions(line.values.get(columns.caption, ""), Lines.whole)
        except ValueError as error:
            raise ValueError(f"{columns.caption} {error}") from error
        for prompt in found:
            content = digest("prompt", prompt).hex()
            several = f"{named}#{content[:ID_HEX]}" if len(found) > 1 else named
            yield Row(id=several or content, prompt=prompt, size=size, source=path)

    def _size(self, columns: Columns, values: Mapping[str, Any]) -> tuple[int, int]:
        if columns.height is None:
            return self.config.size[0], self.config.size[1]
        sides = [str(values.get(column, "")).strip() for column in (columns.height, columns.width)]
        if not all(side.isascii() and side.isdigit() and int(side) > 0 for side in sides):
            raise ValueError(f"{columns.height} and {columns.width} are {sides[0]!r} and {sides[1]!r} where pixels are needed")
        return int(sides[0]), int(sides[1])

    def _settle(self, path: Path, rows: Mapping[str, Row], faults: list[tuple[Line, str]]) -> None:
        self.skipped = [(_short(path, line), why) for line, why in faults]
        if faults and (self.config.on_error is OnError.stop or not rows):
            which = f"{len(faults)} of {len(faults) + len(rows)} rows"
            fix = "repair them, or leave them out with data.on_error=skip" if rows else "repair them"
            raise DataError([f"{line.where}: {why}" for line, why in faults], f"data.path: {which} cannot be used; {fix}")
        if not rows:
            raise ConfigError("data.path", f"{path} has no prompts", "give a file with some")


def _text_lines(path: Path) -> list[Line]:
    """Each line that is not empty, as a table's line with a prompt. Raises ConfigError, DataError."""
    try:
        text = decoded(path.read_bytes())
    except OSError as error:
        raise ConfigError("data.path", f"{path} cannot be read: {error.strerror}", "give a file that you may read") from error
    except ValueError as error:
        raise DataError([f"{path} is not UTF-8: {error}"], "data.path: save the file as UTF-8") from error
    lines = text.removesuffix("\n").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    found = [Line(f"{path}, line {n}", {"prompt": line}) for n, line in enumerate(lines, start=1) if line.strip()]
    if empty := len(lines) - len(found):
        log.info("%s: %d empty lines passed over", path, empty)
    return found


def _short(path: Path, line: Line) -> str:
    return line.where.removeprefix(f"{path}, ")
