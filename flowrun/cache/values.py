"""Values as text and leaves, and back, exactly: dtype, shape, structure. Nothing executable is stored.

The text is JSON. None, booleans, integers, floats and strings stand for themselves; everything else is an object with
one entry: {"tensor": n} (leaf n), {"list": [...]}, {"tuple": [...]}, {"dict": [[key, value], ...]},
{"named": [name, [...]]} (a registered named tuple), {"absent": "not returned" or "deleted"}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from flowrun.cache.shard import Form, Leaf
from flowrun.config import Failure

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
EIGHT_BIT_FLOATS = {dtype for code, dtype in DTYPES.items() if code.startswith("F8")}
ONE_TENSOR = '{"tensor": 0}'
_registered: dict[str, type] = {}


class Absence:
    """What is stored for a name that has no value. There are two, compared by identity."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return self.what


NOT_RETURNED: Final = Absence("not returned")  # the unit might have returned it, and did not
DELETED: Final = Absence("deleted")  # a take-over unit removed it
ABSENCES = {absence.what: absence for absence in (NOT_RETURNED, DELETED)}


class BadValue(Failure):
    """A value that must not be stored: it holds NaN or infinity, or is of a kind that cannot come back exactly."""

    def __init__(self, row: str, field: str, what: str, fix: str) -> None:
        self.row, self.field = row, field
        super().__init__(f"row {row!r}: {field} {what}", fix)


def register(cls: type) -> type:
    """Let values hold named tuples of type `cls`, stored under module and class name, read only where registered."""
    if not (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        raise TypeError(f"{cls.__name__} is not a named tuple")
    _registered[_name(cls)] = cls
    return cls


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def encode(value: Any, row: str, field: str) -> tuple[str, list[Leaf]]:
    """Text and leaves of `value`; the leaves share no memory with it. Raises BadValue naming row and field."""
    leaves: list[Leaf] = []
    return json.dumps(_plain(value, leaves, row, field)), leaves


def _plain(value: Any, leaves: list[Leaf], row: str, field: str) -> Any:
    """What stands for `value` in the text. Tensors are added to `leaves`."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        if not math.isfinite(value):
            raise BadValue(row, field, f"holds {value}", "a cached value must be finite")
        return value
    if kind is Tensor:
        leaves.append(_leaf(value, row, field))
        return {"tensor": len(leaves) - 1}
    if kind in (list, tuple):
        return {kind.__name__: [_plain(item, leaves, row, field) for item in value]}
    if kind is dict:
        return {"dict": [[_plain(part, leaves, row, field) for part in pair] for pair in value.items()]}
    if _registered.get(_name(kind)) is kind:
        return {"named": [_name(kind), [_plain(item, leaves, row, field) for item in value]]}
    if kind is Absence:
        return {"absent": value.what}
    raise BadValue(row, field, f"holds a {_name(kind)}", "return tensors and plain data, or register the named tuple")


def _leaf(tensor: Tensor, row: str, field: str) -> Leaf:
    if tensor.layout is not torch.strided or tensor.dtype not in CODES or tensor.is_meta:
        what = f"holds a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise BadValue(row, field, what, f"dense tensors of these types can be stored: {', '.join(map(str, CODES))}")
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)  # contiguous, own elements only
    copy.copy_(tensor.detach())
    _refuse_nonfinite(copy, row, field)
    return Leaf(CODES[tensor.dtype], tuple(tensor.shape), _bytes(copy))


def _refuse_nonfinite(tensor: Tensor, row: str, field: str) -> None:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    real = real.float() if tensor.dtype in EIGHT_BIT_FLOATS else real  # they have no reductions
    least, most = real.aminmax()  # NaN wins both; many times quicker than isfinite().all()
    if not math.isfinite(least.item()) or not math.isfinite(most.item()):
        nans, infinities = int(real.isnan().sum()), int(real.isinf().sum())
        what = f"holds {nans} NaN and {infinities} infinite of {real.numel()} {tensor.dtype} numbers"
        raise BadValue(
            row, field, what, "nothing of it was stored; a wider precision may help (bf16 or fp32 instead of fp16)"
        )


def _bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor, uint8, its last axis as many times longer as an element has bytes."""
    return (tensor if tensor.ndim else tensor.reshape(1)).view(torch.uint8).numpy()


def decode(text: str, tensors: Sequence[Tensor]) -> Any:
    """The value that `text` describes, with these tensors in it. Raises Failure for a named tuple not registered."""
    return tensors[0] if text == ONE_TENSOR else _value(json.loads(text), tensors)


def _value(plain: Any, tensors: Sequence[Tensor]) -> Any:
    if type(plain) is not dict:
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "absent":
        return ABSENCES[content]
    if kind == "named":
        return _named(content[0])(*[_value(item, tensors) for item in content[1]])
    if kind == "dict":
        return {_value(key, tensors): _value(item, tensors) for key, item in content}
    items = [_value(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


def _named(name: str) -> type:
    if name not in _registered:
        raise Failure(
            f"a cached value holds a {name}, which this process has not registered",
            "import the module that registers it (flowrun.cache.values.register)",
        )
    return _registered[name]


def take(place: int, form: Form) -> tuple[Any, list[np.ndarray]]:
    """The value, its tensors each in fresh, aligned memory of its own; and that memory, to be filled (see Catalog.read)."""
    tensors = [torch.empty(shape, dtype=DTYPES[code]) for code, shape in form.kinds]
    return decode(form.text, tensors), [_bytes(tensor) for tensor in tensors]


class Stack:
    """Takes values of one tensor each into one fresh tensor, `batch` [count, *shape], shaped by the first of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.first: Form | None = None

    def take(self, place: int, form: Form) -> tuple[None, list[np.ndarray]]:
        """Raises ValueError for a value that is no tensor, or of another type or shape."""
        if form.text != ONE_TENSOR:
            raise ValueError(f"value {place} is not a single tensor, so it cannot be stacked")
        if self.first is None:
            ((code, shape),) = form.kinds
            self.first, self.batch = form, torch.empty((self.count, *shape), dtype=DTYPES[code])
            self._rows = _bytes(self.batch).reshape(self.count, -1) if self.batch.numel() else np.empty((self.count, 0), np.uint8)
        if form.kinds != self.first.kinds:
            both = " and ".join(f"{code} {list(shape)}" for one in (self.first, form) for code, shape in one.kinds)
            raise ValueError(f"only tensors of equal type and shape can be stacked, here are {both}")
        return None, [self._rows[place]]
