"""Seeing that a unit changed an input in place: a tensor by its version counter, a container by what it holds."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flowrun.graph.state import State
from flowrun.graph.unit import Unit

_END = object()


class Watched(NamedTuple):
    """One input before the unit ran."""

    name: str  # with its scope
    value: Any
    parts: list[Any]
    versions: list[int]


def watch(unit: Unit, state: State) -> list[Watched]:
    """Every input of the unit that can be changed in place."""
    scopes = {"shared": state.shared, "posi": state.posi, "nega": state.nega}
    params = [(scope, name) for scope in scopes for name in scopes[scope]] if unit.is_barrier else unit.reads
    found = []
    for scope, name in params:
        value = scopes[scope].get(name)
        if isinstance(value, (Tensor, dict, list, tuple)):
            parts = _outline(value)
            found.append(Watched(f"{scope}.{name}", value, parts, _versions(parts)))
    return found


def changed(inputs: list[Watched]) -> str | None:
    """The name of an input that is not what it was."""
    for name, value, parts, versions in inputs:
        now = _outline(value)
        same = len(now) == len(parts) and all(a is b for a, b in zip(now, parts, strict=True))
        if not same or _versions(now) != versions:
            return name
    return None


def _outline(value: Any) -> list[Any]:
    """Containers, keys and leaves in order; two outlines of one value hold the same objects unless it was changed."""
    if isinstance(value, dict):
        return [value, *(part for key, item in value.items() for part in (key, *_outline(item))), _END]
    if isinstance(value, (list, tuple)):
        return [value, *(part for item in value for part in _outline(item)), _END]
    return [value]


def _versions(parts: list[Any]) -> list[int]:
    return [part._version for part in parts if isinstance(part, Tensor)]
