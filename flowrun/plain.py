"""State dictionaries without pickle: tensors apart, the rest as JSON.

Takes what torch's optimizers and schedules keep: dicts with text or whole-number keys, lists, tuples, numbers, text,
bools, None, tensors. A pickle could hold more, and could run code when it is read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def pack(state: Any) -> tuple[dict[str, Tensor], Any]:
    """(tensors by path, JSON-able plan of the whole). Raises TypeError naming the path of anything else.

    Tensors are references, not copies. JSON keeps floats exactly: Python writes the shortest text that reads equal."""
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(state, "state", tensors)


def unpack(tensors: dict[str, Tensor], plan: Any) -> Any:
    """What was packed, types included."""
    if not isinstance(plan, dict):
        return plan
    ((kind, body),) = plan.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "dict":
        return {key: unpack(tensors, value) for key, value in body}
    items = [unpack(tensors, value) for value in body]
    return tuple(items) if kind == "tuple" else items


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = path if path not in tensors else f"{path}#{len(tensors)}"  # {"a.b": t} beside {"a": {"b": t}}
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        strange = [key for key in value if type(key) not in (str, int)]
        if strange:
            raise TypeError(f"{path} has a key of type {type(strange[0]).__name__}, which cannot be saved")
        return {"dict": [[key, _pack(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{path} is a {type(value).__name__}, which cannot be saved")
