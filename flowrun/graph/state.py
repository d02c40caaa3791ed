"""What flows between units: the three scopes of one row, and the record of what one unit did to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrun.graph.unit import Param

ALIGNMENT = 64  # bytes; torch's own allocations start at multiples of it, and SIMD sums depend on it


@dataclass(slots=True)
class State:
    """One row's values by scope."""

    shared: dict[str, Any] = field(default_factory=dict)
    posi: dict[str, Any] = field(default_factory=dict)
    nega: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> State:
        return State(dict(self.shared), dict(self.posi), dict(self.nega))

    def get(self, param: Param) -> Any:
        """Raises KeyError when the name is not there."""
        return getattr(self, param[0])[param[1]]

    def apply(self, record: Record) -> None:
        """Write what a unit returned, remove what it deleted."""
        for (scope, name), value in record.values.items():
            getattr(self, scope)[name] = value
        for scope, name in record.deleted:
            getattr(self, scope).pop(name, None)


@dataclass(frozen=True, slots=True)
class Record:
    """What one unit returned for one row, whatever was there before: values by parameter, and what it deleted."""

    values: Mapping[Param, Any]
    deleted: frozenset[Param] = frozenset()


def canonical(value: Any) -> Any:
    """The value in the form that it would have when read back from disk: every tensor contiguous, in memory of its own.

    Networks round differently on misaligned or channels-last inputs, so this is what makes cached equal live."""
    if isinstance(value, Tensor):
        return value if _own(value) else value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(canonical, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(canonical, value))
    return value


def tensors(value: Any) -> list[Tensor]:
    """All tensors inside a value."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def _own(tensor: Tensor) -> bool:
    return (
        tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and tensor.data_ptr() % ALIGNMENT == 0
    )
