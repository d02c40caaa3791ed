"""Seeing that a unit changed an input in place: a tensor by its version counter, a container by what it holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowrun.graph.state import State
from flowrun.graph.unit import Param, Unit

Watched = tuple[Param, Any, Any]  # an input, its value, and what `_look` saw before the unit ran
_END = object()


def watch(unit: Unit, state: State) -> list[Watched]:
    """Every input of the unit that can be changed in place."""
    scopes = {"shared": state.shared, "posi": state.posi, "nega": state.nega}
    params = [(scope, name) for scope in scopes for name in scopes[scope]] if unit.is_barrier else unit.reads
    found = []
    for param in params:
        value = scopes[param[0]].get(param[1])
        if isinstance(value, (Tensor, dict, list, tuple)):
            found.append((param, value, _look(value)))
    return found


def changed(inputs: list[Watched]) -> Param | None:
    """The first input that is not what it was."""
    for param, value, before in inputs:
        now = _look(value)
        if now != before if isinstance(value, Tensor) else not _same(now, before):
            return param
    return None


def _look(value: Any) -> Any:
    """A tensor's version; of a container its parts in order, each tensor followed by its version."""
    return value._version if isinstance(value, Tensor) else _outline(value)


def _outline(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value, value._version]
    if isinstance(value, dict):
        return [value, *(part for key, item in value.items() for part in (key, *_outline(item))), _END]
    if isinstance(value, (list, tuple)):
        return [value, *(part for item in value for part in _outline(item)), _END]
    return [value]


def _same(now: list[Any], before: list[Any]) -> bool:
    """The same objects in order; whole numbers by value, since a version is a new object each time it is asked for."""
    if len(now) != len(before):
        return False
    return all(a is b or (type(a) is type(b) is int and a == b) for a, b in zip(now, before, strict=True))
