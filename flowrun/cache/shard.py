"""A shard: many values in one immutable safetensors file. No torch.

A value is a JSON text (its structure and plain data, see `values`) and any number of leaves (its tensors).
V values, T leaves:

    keys       [V, 16]  address of each value
    checks     [V, 16]  xxh3_128 over key, text and leaves
    row, text, field  [V]  numbers into the row ids, the distinct texts and metadata["fields"]
    leaves     [V]      how many leaves the value has; leaves follow one another in the order of the values
    leaf.column, leaf.length  [T]  number into metadata["columns"]; how many rows of that column the leaf takes
    rows.*, texts.*     packed strings
    values/<field>/<type>/<tail>  [sum of lengths, *tail]  a column: all leaves of one field, type and tail shape

A leaf begins in its column where the previous leaf of that column ends. A tensor without dimensions is one row of a
column whose tail is called `scalar`. The number columns are as narrow as their numbers allow.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from flowrun.cache import tensorfile
from flowrun.cache.tensorfile import BULK, ITEM_BYTES, Array, Damaged, Strings, TensorFile, pack, shrink, table

FORMAT = "flowrun-cache-1"
KEY_BYTES = 16
PAGE = mmap.PAGESIZE
PIECE_BYTES = 1 << 18  # read and hashed at once: it stays in the processor's cache
MOST_FORMS = 4096  # remembered of a shard


class Leaf(NamedTuple):
    """One tensor's bytes: safetensors' type name, shape, and a contiguous buffer."""

    code: str
    shape: tuple[int, ...]
    data: Any


class Form(NamedTuple):
    """A value but for its address and the bytes of its tensors: text, type name and shape of each leaf. head: all of it."""

    text: str
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    head: bytes


class Stored(NamedTuple):
    """A value as it lies in a shard."""

    key: bytes
    row: str
    field: str
    text: str
    leaves: tuple[Leaf, ...]


def checksum(key: bytes, text: str, leaves: Sequence[Leaf]) -> bytes:
    """xxh3_128 over everything that makes the value, its address included."""
    form = form_of(text, tuple([(leaf.code, leaf.shape) for leaf in leaves]))
    return _checksum(key, form, [leaf.data for leaf in leaves])


def form_of(text: str, kinds: tuple[tuple[str, tuple[int, ...]], ...]) -> Form:
    return Form(text, kinds, (text + "".join([f"{code}{shape}" for code, shape in kinds])).encode())


def _checksum(key: bytes, form: Form, memories: Sequence[Any]) -> bytes:
    hasher = xxhash.xxh3_128(key + form.head)
    for memory in memories:
        hasher.update(memory)
    return hasher.digest()


class ShardBuilder:
    """Collects values of distinct keys and writes them as one shard. Holds the leaves' buffers until then."""

    def __init__(self) -> None:
        self.keys: dict[bytes, None] = {}  # in order; `in` is quick
        self.checks: list[bytes] = []
        self.nbytes = 0
        self._places: dict[str, list[int]] = {
            name: [] for name in ("row", "text", "field", "leaves", "column", "length")
        }
        self._names: dict[str, dict[str, int]] = {"row": {}, "text": {}, "field": {}, "column": {}}
        self._columns: list[tuple[str, tuple[int, ...], list[Any]]] = []

    def add(self, value: Stored, check: bytes) -> None:
        self.keys[value.key] = None
        self.checks.append(check)
        for name, string in (("row", value.row), ("text", value.text), ("field", value.field)):
            self._places[name].append(self._names[name].setdefault(string, len(self._names[name])))
        self._places["leaves"].append(len(value.leaves))
        for leaf in value.leaves:
            self._add_leaf(value.field, leaf)
            self.nbytes += math.prod(leaf.shape) * ITEM_BYTES[leaf.code]
        self.nbytes += len(value.text)

    def _add_leaf(self, field: str, leaf: Leaf) -> None:
        length, tail = (leaf.shape[0], leaf.shape[1:]) if leaf.shape else (1, ())
        kind = ("x".join(map(str, tail)) or "vector") if leaf.shape else "scalar"
        columns = self._names["column"]
        number = columns.setdefault(f"{BULK}{field}/{leaf.code}/{kind}", len(columns))
        if number == len(self._columns):
            self._columns.append((leaf.code, tail, []))
        self._columns[number][2].append(leaf.data)
        self._places["column"].append(number)
        self._places["length"].append(length)

    def write(self, path: Path) -> None:
        """Raises Failure when the disk is full; nothing is left at `path` then."""
        places, names = self._places, self._names
        lengths = np.bincount(np.asarray(places["column"], np.int64), places["length"], len(self._columns)).astype(
            np.int64
        )
        arrays = [
            Array(name, code, (int(length), *tail), pieces)
            for name, length, (code, tail, pieces) in zip(names["column"], lengths, self._columns, strict=True)
        ]
        arrays += [
            table(name, np.frombuffer(b"".join(digests), np.uint8).reshape(-1, KEY_BYTES))
            for name, digests in (("keys", self.keys), ("checks", self.checks))
        ]
        arrays += [table(name, shrink(places[name])) for name in ("row", "text", "field", "leaves")]
        arrays += [table(f"leaf.{name}", shrink(places[name])) for name in ("column", "length")]
        arrays += pack("rows", list(names["row"])) + pack("texts", list(names["text"]))
        metadata = {"columns": json.dumps(list(names["column"])), "fields": json.dumps(list(names["field"]))}
        tensorfile.write_tensorfile(path, FORMAT, arrays, metadata)


class Column(NamedTuple):
    code: str
    tail: tuple[int, ...]
    scalar: bool
    row_bytes: int
    begin: int


class Shard:
    """An open shard. Values are known by their number, 0 ... len - 1."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, and Damaged, OtherFormat."""
        self.name, self.file = path.name, TensorFile(path, FORMAT)
        self.bytes = memoryview(self.file.map)
        self.keys = self.file.array("keys")
        self._key_bytes, self._check_bytes = (memoryview(self.file.array(name).reshape(-1)) for name in ("keys", "checks"))
        self.rows, self.texts = Strings(self.file, "rows"), Strings(self.file, "texts")
        self.row, self.text, self.field = (memoryview(self.file.array(name)) for name in ("row", "text", "field"))
        self.fields: list[str] = json.loads(self.file.metadata["fields"])
        self.columns = [self._column(name) for name in json.loads(self.file.metadata["columns"])]
        self._place_leaves()
        self._forms: dict[tuple[int, ...], Form] = {}  # most values have one of few forms
        self.checked = bytearray(len(self))  # 1: its checksum was found right by this process

    def __len__(self) -> int:
        return len(self.keys)

    def _column(self, name: str) -> Column:
        code, shape, begin, _ = self.file.spans[name]
        return Column(code, shape[1:], name.endswith("/scalar"), math.prod(shape[1:]) * ITEM_BYTES[code], begin)

    def _place_leaves(self) -> None:
        """first_leaf [V + 1]; leaf_column, leaf_length, leaf_begin [T], the last in bytes from the start of the file.

        Memory views: reading one number from them is several times quicker than from an array.
        """
        column_of, length = self.file.array("leaf.column"), self.file.array("leaf.length")
        begin = np.zeros(len(column_of), np.int64)
        for number, column in enumerate(self.columns):
            here = column_of == number
            lengths = length[here].astype(np.int64)
            begin[here] = column.begin + (np.cumsum(lengths) - lengths) * column.row_bytes
        first = np.concatenate([[0], np.cumsum(self.file.array("leaves"), dtype=np.int64)])
        self.first_leaf, self.leaf_begin = memoryview(first), memoryview(begin)
        self.leaf_column, self.leaf_length = memoryview(column_of), memoryview(length)

    def key(self, number: int) -> bytes:
        return self._key_bytes[KEY_BYTES * number : KEY_BYTES * (number + 1)].tobytes()

    def check(self, number: int) -> bytes:
        return self._check_bytes[KEY_BYTES * number : KEY_BYTES * (number + 1)].tobytes()

    def row_id(self, number: int) -> str:
        """The row for which the value was stored first; equal values of other rows are not stored again."""
        return self.rows[self.row[number]]

    def text_of(self, number: int) -> str:
        return self.texts[self.text[number]]

    def form_of(self, number: int) -> Form:
        first, end = self.first_leaf[number], self.first_leaf[number + 1]
        numbers = (self.text[number], *self.leaf_column[first:end], *self.leaf_length[first:end])
        form = self._forms.get(numbers)
        if form is None:
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            kinds = tuple([self._kind(leaf) for leaf in range(first, end)])
            form = self._forms[numbers] = form_of(self.text_of(number), kinds)
        return form

    def fill(self, number: int, memories: Sequence[Any]) -> None:
        """Read the value's tensors into `memories`, one buffer of each one's size. Raises Damaged, OSError."""
        for leaf, memory in enumerate(memories, self.first_leaf[number]):
            self.file.read_into(memory, self.leaf_begin[leaf])

    def leaves_of(self, number: int) -> tuple[Leaf, ...]:
        """The value's tensors; their data are views of the file."""
        return tuple([self._leaf(leaf) for leaf in range(self.first_leaf[number], self.first_leaf[number + 1])])

    def stored(self, number: int) -> Stored:
        return Stored(
            self.key(number),
            self.row_id(number),
            self.fields[self.field[number]],
            self.text_of(number),
            self.leaves_of(number),
        )

    def _kind(self, leaf: int) -> tuple[str, tuple[int, ...]]:
        column = self.columns[self.leaf_column[leaf]]
        return column.code, column.tail if column.scalar else (self.leaf_length[leaf], *column.tail)

    def _leaf(self, number: int) -> Leaf:
        begin, end = self._span(number)
        return Leaf(*self._kind(number), self.bytes[begin:end])

    def _span(self, leaf: int) -> tuple[int, int]:
        """First byte and end in the file."""
        begin = self.leaf_begin[leaf]
        return begin, begin + self.leaf_length[leaf] * self.columns[self.leaf_column[leaf]].row_bytes

    def is_intact(self, number: int) -> bool:
        """Whether the value's checksum is right. Reads all of its bytes from the file."""
        hasher, scratch = xxhash.xxh3_128(self.key(number) + self.form_of(number).head), np.empty(PIECE_BYTES, np.uint8)
        for leaf in range(self.first_leaf[number], self.first_leaf[number + 1]):
            begin, end = self._span(leaf)
            for at in range(begin, end, PIECE_BYTES):
                piece = scratch[: end - at]
                try:
                    self.file.read_into(piece, at)
                except Damaged:  # cut short since it was opened
                    return False
                hasher.update(piece)
        return hasher.digest() == self.check(number)

    def matches(self, number: int, form: Form, memories: Sequence[Any]) -> bool:
        """Whether the checksum of value `number` is right for a value of this form with its tensors in `memories`."""
        return _checksum(self.key(number), form, memories) == self.check(number)

    def sizes(self) -> np.ndarray:
        """Bytes of each value's tensors and text [V], int64."""
        row_bytes = np.array([column.row_bytes for column in self.columns], np.int64)
        leaf_bytes = row_bytes[np.asarray(self.leaf_column)] * np.asarray(self.leaf_length) if self.columns else []
        sums = np.concatenate([[0], np.cumsum(leaf_bytes, dtype=np.int64)])
        text_bytes = np.diff(self.texts.ends.astype(np.int64), prepend=0)
        return np.diff(sums[np.asarray(self.first_leaf)]) + text_bytes[np.asarray(self.text)]

    def advise(self, number: int, advice: int) -> None:
        """Tell the system how the value's pages will be used (mmap.MADV_WILLNEED: read them ahead)."""
        for leaf in range(self.first_leaf[number], self.first_leaf[number + 1]):
            begin, end = self._span(leaf)
            start = begin - begin % PAGE
            if begin < end:
                self.file.map.madvise(advice, start, end - start)
