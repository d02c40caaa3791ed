"""What flows between units: the three scopes of one row, and the record of what one unit did to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, contiguous_format

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


def canonical(value: Any, gradient: bool = False) -> Any:
    """The value in the form that it would have when read back from disk: plain containers, every tensor contiguous, in
    aligned memory that holds its own elements only, and detached unless `gradient`.

    Networks round differently on misaligned or channels-last inputs, so this is what makes cached equal live."""
    if isinstance(value, Tensor):
        return _tensor(value, gradient)
    if isinstance(value, dict):
        return {key: canonical(item, gradient) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [canonical(item, gradient) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors(value: Any) -> list[Tensor]:
    """All tensors inside a value."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def _tensor(tensor: Tensor, gradient: bool) -> Tensor:
    if not gradient and (tensor.requires_grad or type(tensor) is not Tensor):
        tensor = tensor.detach()  # no_grad alone leaves a returned weight a Parameter that requires a gradient
    return tensor if _own(tensor) else tensor.clone(memory_format=contiguous_format)


def _own(tensor: Tensor) -> bool:
    return (
        tensor.stride() == _strides(tensor.shape)
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and tensor.data_ptr() % ALIGNMENT == 0
        and not tensor.is_inference()  # such a tensor has no version counter, so a later change could not be seen
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a fresh tensor. `is_contiguous` overlooks dimensions of size 1, but convolutions choose their algorithm by the
    strides of those too: [B, 1, H, W] can be contiguous and channels-last at once."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
