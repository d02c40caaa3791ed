"""Tables as text, line by line: csv, tsv, json, jsonl, parquet. No value becomes a number or a gap on the way.

What cannot be read of a line is that line's fault; what makes the whole table unreadable is an error at once.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowrun.config import ConfigError, DataError
from flowrun.data._captions import decoded, parsed
from flowrun.files import missing

ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, slots=True)
class Line:
    """where: for messages, `train.csv, line 8`. fault: why there are no values."""

    where: str
    values: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


def read_table(path: Path, key_column: str, text_column: str) -> list[Line]:
    """The lines of a table in order. A JSON object {name: text} or {name: {...}} has the names in `key_column` and the
    texts in `text_column`.

    Raises ConfigError for an ending that is none of ENDINGS, DataError when nothing can be read."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise ConfigError("data.path", f"{path.name} is no table", f"tables end in {', '.join(ENDINGS)}")
    if ending == ".parquet":
        return list(_parquet(path))
    text = _text(path)
    if ending in DELIMITERS:
        return list(_csv(path, text, DELIMITERS[ending]))
    return list(_jsonl(path, text) if ending == ".jsonl" else _json(path, text, key_column, text_column))


def table_file(path: str | None) -> Path:
    """`path` as a file that is there. Raises ConfigError."""
    if path is None:
        raise ConfigError("data.path", "names no file", "give data.path=FILE")
    table = Path(path).expanduser().absolute()
    if (why := missing(table)) and why != "does not exist":
        raise ConfigError("data.path", f"{table} {why}", "give a table that you may read")
    if table.is_dir():
        raise ConfigError("data.path", f"{table} is a folder", "give a table in it, or read its pictures with data=folder")
    if why:
        near = get_close_matches(table.name, [f.name for f in table.parent.iterdir()] if table.parent.is_dir() else [])
        raise ConfigError("data.path", f"{table} does not exist", f"did you mean {near[0]}?" if near else "give an existing file")
    return table


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError("data.path", f"{path} cannot be read: {error.strerror}", "give a table that you may read") from error
    try:
        return decoded(data)
    except ValueError as error:
        raise DataError([f"{path} is not UTF-8: {error}"], "data.path: save the table as UTF-8") from error


def _csv(path: Path, text: str, delimiter: str) -> Iterator[Line]:
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    at = 1
    while True:
        where = f"{path}, line {at}"
        try:
            cells = next(lines)
        except StopIteration:
            break
        except csv.Error as error:
            yield Line(where, fault=f"cannot be read ({error}); nothing after it is")
            break
        at = lines.line_num + 1
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = _header(path, cells)
        elif len(cells) != len(header):
            hint = " (is there a comma in a text that is not in quotes?)" if len(cells) > len(header) else ""
            yield Line(where, fault=f"has {len(cells)} fields, the first line has {len(header)}{hint}")
        else:
            yield Line(where, dict(zip(header, cells, strict=True)))


def _header(path: Path, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError([f"{path}, line 1: the column {twice[0]!r} stands twice"], "data.path: give each column its name")
    return names


def _jsonl(path: Path, text: str) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _object(f"{path}, line {number}", line)


def _object(where: str, line: str) -> Line:
    try:
        content = parsed(line)
    except ValueError as error:
        return Line(where, fault=str(error))
    return Line(where, content) if isinstance(content, dict) else Line(where, fault="is no JSON object, {name: value}")


def _json(path: Path, text: str, key_column: str, text_column: str) -> Iterator[Line]:
    try:
        content = parsed(text)
    except ValueError as error:
        raise DataError([f"{path} {error}"], "data.path: repair the table") from error
    if isinstance(content, dict):
        items = [(name, {key_column: name, **(item if isinstance(item, dict) else {text_column: item})})
                 for name, item in content.items()]  # fmt: skip
    else:
        items = enumerate(content, start=1) if isinstance(content, list) else [("1", content)]
    for name, item in items:
        where = f"{path}, entry {name}"
        yield Line(where, item) if isinstance(item, dict) else Line(where, fault="is no JSON object, {name: value}")


def _parquet(path: Path) -> Iterator[Line]:
    if find_spec("pyarrow") is None:
        raise ConfigError("data.path", f"{path.name} needs the package pyarrow", "pip install 'flowrun[tables]'")
    from pyarrow import ArrowException, parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches()
        rows = [row for batch in batches for row in batch.to_pylist()]
    except (OSError, ArrowException) as error:
        raise DataError([f"{path} cannot be read: {error}"], "data.path: repair the table") from error
    for number, row in enumerate(rows, start=1):
        yield Line(f"{path}, row {number}", {name: str(v) if type(v) is int else v for name, v in row.items()})
