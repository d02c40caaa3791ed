"""Named arrays in one safetensors file, written atomically and read through one memory map. No torch.

Every array but the bulk ones (`values/...`, which carry a checksum each) is sealed together with the header by one
xxh3_128, so that a file whose tables were damaged is recognised when it is opened.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from flowrun.disk import saving
from flowrun.files import appearing

# Bytes of one element, by safetensors' name of the type.
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
              "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
              "U64": 8, "I64": 8, "F64": 8, "C64": 8}  # fmt: skip
TABLE_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I32": "<i4", "I64": "<i8"}
CODES = {np.dtype(dtype): code for code, dtype in TABLE_DTYPES.items()}
SEAL, BULK, ALIGNMENT = "seal", "values/", 64


class Damaged(Exception):
    """`path` is not the whole, unchanged file that was written."""

    def __init__(self, path: Path, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"{path}: {why}")


class OtherFormat(Damaged):
    """`path` is whole, but not of the format that this program reads."""

    def __init__(self, path: Path, found: str | None, wanted: str) -> None:
        super().__init__(path, f"its format is {found!r}, this program reads {wanted!r}")


@dataclass(frozen=True, slots=True)
class Array:
    """One array to write: safetensors' type name, shape, and its bytes in order, in any number of pieces."""

    name: str
    code: str
    shape: tuple[int, ...]
    pieces: Sequence[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.code]


def table(name: str, array: np.ndarray) -> Array:
    return Array(name, CODES[array.dtype], array.shape, [np.ascontiguousarray(array)])


def shrink(numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    """The numbers, none negative, in the smallest unsigned type that holds them all."""
    array = np.asarray(numbers, dtype=np.uint64)
    return array.astype(np.min_scalar_type(int(array.max())) if array.size else np.uint8)


def write_tensorfile(path: Path, format: str, arrays: Sequence[Array], metadata: Mapping[str, str]) -> None:
    """Write `arrays` to `path`, atomically and in one pass. Raises Failure when the disk is full."""
    arrays = sorted(
        [*arrays, Array(SEAL, "U8", (16,), ())], key=lambda a: (-ITEM_BYTES[a.code], a.name == SEAL, a.name)
    )
    header: dict[str, Any] = {"__metadata__": {"format": format, **metadata}}
    end = 0
    for array in arrays:
        begin, end = end, end + array.nbytes
        header[array.name] = {"dtype": array.code, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with saving(path.parent, path.name), appearing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        _write_arrays(file, arrays, xxhash.xxh3_128(text))


def _write_arrays(file: BinaryIO, arrays: Sequence[Array], seal: xxhash.xxh3_128) -> None:
    for array in arrays:
        for piece in array.pieces:
            file.write(piece)
            if not array.name.startswith(BULK):
                seal.update(piece)
        if array.name == SEAL:  # sorts last: its item is the smallest
            file.write(seal.digest())


class TensorFile:
    """An open file. map: the whole file; spans: array name -> (type name, shape, first byte, end byte) in the map.

    Tables are read through the map. What is large is read into memory that is there already (`read_into`): the first
    touch of a map's pages costs more than the system's copy does.
    """

    def __init__(self, path: Path, format: str) -> None:
        """Raises FileNotFoundError, OtherFormat, and Damaged when the file was cut short or its tables were changed."""
        self.path = path
        self.handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.handle)
        try:
            self.map = mmap.mmap(self.handle, 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise Damaged(path, "it is empty") from error
        self.spans: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        try:
            header = self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(path, "its header cannot be read") from error
        self._check_seal(header)
        if self.metadata.get("format") != format:
            raise OtherFormat(path, self.metadata.get("format"), format)

    def _read_header(self) -> bytes:
        start = 8 + int.from_bytes(self.map[:8], "little")
        header = self.map[8:start]
        parsed = json.loads(header)
        self.metadata: dict[str, str] = parsed.pop("__metadata__")
        for name, entry in parsed.items():
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            if end - begin != math.prod(shape) * ITEM_BYTES[entry["dtype"]]:
                raise ValueError(name)
            self.spans[name] = (entry["dtype"], shape, start + begin, start + end)
        return header

    def _check_seal(self, header: bytes) -> None:
        ends = max((span[3] for span in self.spans.values()), default=-1)
        if ends != len(self.map) or SEAL not in self.spans:
            raise Damaged(self.path, f"it has {len(self.map)} bytes, its header says {ends}")
        seal, whole = xxhash.xxh3_128(header), memoryview(self.map)
        for name, (_, _, begin, end) in self.spans.items():
            if name != SEAL and not name.startswith(BULK):
                seal.update(whole[begin:end])
        if seal.digest() != self.array(SEAL).tobytes():
            raise Damaged(self.path, "its tables were changed after they were written")

    def read_into(self, memory: Any, begin: int) -> None:
        """Fill `memory`, a contiguous buffer, with the file's bytes from `begin` on. Raises Damaged when it ends before."""
        got, wanted = os.preadv(self.handle, [memory], begin), memory.nbytes
        while got < wanted:  # the system gives at most 2 GiB at once
            more = os.preadv(self.handle, [memoryview(memory).cast("B")[got:]], begin + got)
            if not more:
                raise Damaged(self.path, f"it was cut short: it ends before byte {begin + wanted}")
            got += more

    def array(self, name: str) -> np.ndarray:
        """A read-only view of a table. Raises Damaged when the file has no such table."""
        if name not in self.spans:
            raise Damaged(self.path, f"it has no table {name!r}")
        code, shape, begin, _ = self.spans[name]
        return np.frombuffer(self.map, TABLE_DTYPES[code], math.prod(shape), begin).reshape(shape)


def pack(name: str, strings: Sequence[str]) -> list[Array]:
    """Strings as two tables, `<name>.bytes` and `<name>.ends`. A path's undecodable bytes (lone surrogates) survive."""
    encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
    joined = np.frombuffer(b"".join(encoded), np.uint8)
    ends = np.cumsum([len(piece) for piece in encoded], dtype=np.int64)
    return [table(f"{name}.bytes", joined), table(f"{name}.ends", shrink(ends))]


class Strings:
    """Packed strings, decoded one by one when asked for."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self.bytes, self.ends = memoryview(file.array(f"{name}.bytes")), file.array(f"{name}.ends")
        self._ends = memoryview(self.ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        begin = self._ends[number - 1] if number else 0
        return str(self.bytes[begin : self._ends[number]], "utf-8", "surrogatepass")

    def all(self) -> list[str]:
        ends = self.ends.tolist()
        return [str(self.bytes[a:b], "utf-8", "surrogatepass") for a, b in zip([0, *ends[:-1]], ends, strict=True)]
