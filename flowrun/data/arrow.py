"""A data set that the `datasets` library saved with `save_to_disk`: its pictures lie in Arrow files and are read in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from flowrun.config import ConfigError, DataError
from flowrun.data._captions import captions
from flowrun.data._columns import InColumns
from flowrun.data._member import File, Member
from flowrun.data._pictures import Entry, Found

STATE, SPLITS = "state.json", "dataset_dict.json"  # of one data set; of a folder with several


class Arrow(InColumns):
    """Rows named by `columns.id`, else by the file name that came with the first picture, else by their number."""

    Config = InColumns.Config

    def find(self) -> Found:
        root = _root(self.config.path)
        entries: list[Entry] = []
        for file in _files(root):
            entries += self._entries(file, len(entries))
        if not entries:
            raise ConfigError("data.path", f"{root} has no rows", "give a data set with a row for each picture")
        _refuse_twins(entries)
        return Found(entries)

    def _entries(self, file: Path, first: int) -> Iterator[Entry]:
        columns, (table, base) = self.config.columns, _table(file)
        columns.check(file.name, table.column_names)
        found = {name: _pictures(file, base, table[column]) for name, column in columns.pictures.items()}
        texts = table[columns.caption].to_pylist()
        ids = table[columns.id].to_pylist() if columns.id is not None else [None] * len(table)
        for number in range(len(table)):
            cells = {name: cells[number] for name, cells in found.items()}
            faults, said = [f"{columns.pictures[name]} {cell.fault}" for name, cell in cells.items() if cell.fault], []
            try:
                said = captions(texts[number], self.config.lines)
            except ValueError as error:
                faults.append(f"{columns.caption} {error}")
            named = next(iter(cells.values())).name if columns.id is None else ids[number]
            row_id = str(first + number) if named in (None, "") else str(named)
            files = {} if faults else {name: cell.file for name, cell in cells.items()}
            yield Entry(row_id, f"{file}, row {first + number}", files, said, faults)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A picture in a table: where its bytes are, and the file name that came with them."""

    file: File | None = None
    name: str | None = None
    fault: str = ""


def _root(path: str | None) -> Path:
    if path is None:
        raise ConfigError("data.path", "names no folder", "give one that the datasets library's save_to_disk made")
    root = Path(path).expanduser().absolute()
    if (root / SPLITS).is_file():
        parts = [child.name for child in sorted(root.iterdir()) if (child / STATE).is_file()]
        raise ConfigError("data.path", f"{root} holds several data sets", f"give one of them: {', '.join(str(root / p) for p in parts)}")
    if not (root / STATE).is_file():
        raise ConfigError("data.path", f"{root} holds no {STATE}", "give a folder that the datasets library's save_to_disk made")
    if find_spec("pyarrow") is None:
        raise ConfigError("data.source", "arrow needs the package pyarrow", "pip install 'flowrun[tables]'")
    return root


def _files(root: Path) -> list[Path]:
    try:
        listed = json.loads((root / STATE).read_text(encoding="utf-8"))["_data_files"]
        return [root / entry["filename"] for entry in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError([f"{root / STATE} cannot be read: {error}"], "data.path: save the data set again") from error


def _table(file: Path) -> tuple[Any, int]:
    """The rows, mapped and not read, and where in memory the file begins. Raises DataError."""
    import pyarrow
    from pyarrow import ipc

    try:
        buffer = pyarrow.memory_map(str(file)).read_buffer()
        return ipc.open_stream(buffer).read_all(), buffer.address
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError([f"{file} cannot be read: {error}"], "data.path: save the data set again") from error


def _pictures(file: Path, base: int, column: Any) -> list[_Cell]:
    """A column of bytes, or of (bytes, path) as the library stores pictures."""
    return [cell for chunk in column.chunks for cell in _cells(file, base, chunk)]


def _cells(file: Path, base: int, chunk: Any) -> Iterator[_Cell]:
    from pyarrow import compute, types

    struct = types.is_struct(chunk.type) and {"bytes", "path"} <= {field.name for field in chunk.type}
    names = chunk.field("path").to_pylist() if struct else [None] * len(chunk)
    content = chunk.field("bytes") if struct else chunk
    if not (types.is_binary(content.type) or types.is_large_binary(content.type)):
        yield from [_Cell(fault=f"is of type {chunk.type} where pictures are needed")] * len(chunk)
        return
    width = np.int64 if types.is_large_binary(content.type) else np.int32
    _, offsets, values = content.buffers()
    ends = np.frombuffer(offsets, width)[content.offset :].tolist()
    for number, there in enumerate(compute.and_(chunk.is_valid(), content.is_valid()).to_pylist()):
        name = names[number]
        if there:
            begin = values.address - base + ends[number]
            yield _Cell(Member(file, name or f"row {number}", begin, ends[number + 1] - ends[number]), name)
        else:
            yield _Cell(Path(name), name) if name else _Cell(fault="is empty")


def _refuse_twins(entries: list[Entry]) -> None:
    """Raises DataError naming the rows that have one name."""
    seen: dict[str, Entry] = {}
    twins = [(entry, seen[entry.id]) for entry in entries if seen.setdefault(entry.id, entry) is not entry]
    if twins:
        lines = [f"{entry.where}: has the name {entry.id!r}, as {other.where.rpartition(', ')[2]}" for entry, other in twins]
        raise DataError(lines, "data.columns.id: name a column in which every row has a name of its own")
