"""A table that names pictures and captions: csv, tsv, json, jsonl or parquet. Rows may have several pictures."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrun.cache.key import digest
from flowrun.config import ConfigError
from flowrun.data._captions import captions, parsed
from flowrun.data._columns import InColumns
from flowrun.data._pictures import ID_HEX, Entry, Found
from flowrun.data._pictures import each as several
from flowrun.data._tables import Line, read_table, table_file

_Key = tuple[str | tuple[str, ...], ...]  # the name in columns.id, or none; then the paths of each picture


class Table(InColumns):
    """Rows named by `columns.id`, else by the path of their first picture as it stands in the table."""

    @dataclass(kw_only=True, slots=True)
    class Config(InColumns.Config):
        root: str | None

    def find(self) -> Found:
        path = table_file(self.config.path)
        root = path.parent if self.config.root is None else Path(self.config.root).expanduser().absolute()
        lines = read_table(path, next(iter(self.config.columns.pictures.values())), self.config.columns.caption)
        if there := list(dict.fromkeys(name for line in lines for name in line.values)):
            self.config.columns.check(path.name, there)
        records: dict[_Key, _Record] = {}
        broken = []
        for line in lines:
            key, faults, said = self._read(line)
            if key is None:
                broken.append(Entry(line.where.removeprefix(f"{path}, "), line.where, {}, faults=faults))
            else:
                records.setdefault(key, _Record(line.where)).add(line.where, said, faults)
        if not records and not broken:
            raise ConfigError("data.path", f"{path} has no rows", "give a table with a line for each row")
        order = {line.where: number for number, line in enumerate(lines)}
        return Found(sorted([*broken, *self._entries(root, records)], key=lambda entry: order[entry.where]))

    def _read(self, line: Line) -> tuple[_Key | None, list[str], list[str]]:
        """(what tells the row from others, faults, captions) of one line. The first is None when it cannot be told."""
        if line.fault:
            return None, [line.fault], []
        columns, faults = self.config.columns, []
        paths = [_paths(line.values.get(column)) for column in columns.pictures.values()]
        for number, (column, given) in enumerate(zip(columns.pictures.values(), paths, strict=True)):
            if isinstance(given, tuple) and (number == 0 or not given):
                faults.append(f"{column} is {reprlib.repr(list(given))} where {'a path is' if number == 0 else 'paths are'} needed")
            faults += [f"{column} {why}" for path in several(given) if (why := _no_path(path))]
        named = line.values.get(columns.id) if columns.id is not None else ""
        if not isinstance(named, str) or (columns.id is not None and not named.strip()):
            faults.append(f"{columns.id} is {named!r} where a text is needed")
        if faults:
            return None, faults, []
        try:
            said = captions(line.values.get(columns.caption, ""), self.config.lines)
        except ValueError as error:
            return (named, *paths), [f"{columns.caption} {error}"], []
        return (named, *paths), [], said

    def _entries(self, root: Path, records: Mapping[_Key, _Record]) -> list[Entry]:
        names, column = list(self.config.columns.pictures), self.config.columns.id
        count = Counter(named or paths[0] for named, *paths in records)
        entries = []
        for (named, *paths), record in records.items():
            row_id, shared = named or paths[0], count[named or paths[0]] > 1
            if shared and named:
                record.faults.append(f"{column} {named!r} stands in lines with other pictures too")
            elif shared:  # one picture with several partners
                row_id = f"{row_id}#{digest(*paths).hex()[:ID_HEX]}"
            files = {name: _files(root, given) for name, given in zip(names, paths, strict=True)}
            entries.append(Entry(row_id, record.where, files, record.captions, record.faults))
        return entries


def _paths(cell: Any) -> Any:
    """A cell's path; several of them as a tuple: a list, or a text that is a JSON list of texts."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = parsed(cell)
        except ValueError:  # a name may begin so
            return cell
    return tuple(cell) if isinstance(cell, list) else cell


def _files(root: Path, given: str | tuple[str, ...]) -> Path | tuple[Path, ...]:
    return tuple(root / path for path in given) if isinstance(given, tuple) else root / given


@dataclass
class _Record:
    """What the lines about one row say."""

    where: str
    captions: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, where: str, captions: Sequence[str], faults: Sequence[str]) -> None:
        if again := [caption for caption in captions if caption in self.captions]:
            self.faults.append(f"its caption {again[0]!r} stands once more in {where.rpartition(', ')[2]}")
        self.captions += captions
        self.faults += faults


def _no_path(value: Any) -> str:
    """Why a cell names no picture file; empty when it may."""
    if not isinstance(value, str):
        return f"is {reprlib.repr(value)} where a path is needed"
    if not value.strip():
        return "is empty"
    return f"is a web address, {value}: download the pictures first" if value.startswith(("http://", "https://")) else ""
