"""What a unit computes, as far as it can be told without running it: its version, its settings, its process's source.

Not seen: functions that the process calls, and objects that it reaches through a module or through `self`. Whoever
changes those raises the unit's version, or names them in its settings.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from types import CodeType, FunctionType, MethodType
from typing import Any

from flowrun.cache.key import digest
from flowrun.config import ConfigError
from flowrun.graph import Unit


def code_identity(unit: Unit) -> bytes:
    """A digest that changes with the unit's version, settings and process.

    Raises ConfigError when the process has no source, or the settings are not plain data.
    """
    try:
        process = _identity(unit.process)
    except _NoSource as error:
        fix = (
            "give a Python function, a method, a functools.partial, or an object whose class defines __call__ in Python"
        )
        raise ConfigError(f"unit {unit.name}", f"the source of its process {error} cannot be read", fix) from error
    try:
        return digest("code", unit.version, unit.settings, process)
    except TypeError as error:
        raise ConfigError(
            f"unit {unit.name}", f"its settings hold what no key can be made of: {error}", "use plain data"
        ) from error


def rows_identity(unit: Unit) -> bytes:
    """The same of how the unit does several rows at once."""
    return digest("rows", _identity(unit.process_rows))


class _NoSource(Exception):
    pass


def _identity(process: Any) -> list[Any]:
    if isinstance(process, functools.partial):
        bound = [_argument(value) for value in process.args]
        named = {name: _argument(value) for name, value in process.keywords.items()}
        return ["partial", _identity(process.func), bound, named]
    if isinstance(process, MethodType):
        return ["method", _identity(process.__func__)]
    if isinstance(process, FunctionType):
        return _function(inspect.unwrap(process))
    call = inspect.getattr_static(type(process), "__call__", None)
    if not isinstance(call, FunctionType):
        raise _NoSource(repr(process))
    return ["object", _class(type(process)), _function(inspect.unwrap(call)), _plain_items(_attributes(process))]


def _function(function: FunctionType) -> list[Any]:
    """Its code, and what the code does not show: values bound when the function was made."""
    cells = zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    defaults = [_argument(value) for value in function.__defaults__ or ()]
    named = {name: _argument(value) for name, value in (function.__kwdefaults__ or {}).items()}
    return ["function", _code(function), _plain_items(dict(cells)), defaults, named]


def _code(function: FunctionType) -> Any:
    """The source; the compiled form where that says more (several lambdas can share their lines) or is all there is."""
    source = None if function.__name__ == "<lambda>" else _source(function)
    return _compiled(function.__code__) if source is None else source


def _source(item: Any) -> str | None:
    """None for code that was not read from a file."""
    try:
        return textwrap.dedent(inspect.getsource(item))
    except (OSError, TypeError):
        return None


def _class(cls: type) -> Any:
    """The source; where there is none, the code of the methods and the plain attributes."""
    source = _source(cls)
    own = {
        name: value for name, value in vars(cls).items() if isinstance(value, FunctionType) or not name.startswith("__")
    }
    return _plain_items(own) if source is None else source


def _compiled(code: CodeType) -> list[Any]:
    return [code.co_code, [_constant(c) for c in code.co_consts], list(code.co_names), list(code.co_varnames)]


def _constant(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return _compiled(constant)
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def _is_plain(value: Any) -> bool:
    """Immutable plain data. Lists and dicts are left out: a process may collect things in them."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def _plain_items(values: dict[str, Any]) -> dict[str, Any]:
    """Those that are plain, and the code of those that are functions (one may be the function asked about)."""
    functions = {name: ["function", _code(value)] for name, value in values.items() if isinstance(value, FunctionType)}
    return functions | {name: value for name, value in values.items() if _is_plain(value)}


def _attributes(item: Any) -> dict[str, Any]:
    slots = [name for cls in type(item).__mro__ for name in cls.__dict__.get("__slots__", ())]
    return {name: getattr(item, name) for name in slots if hasattr(item, name)} | getattr(item, "__dict__", {})


def _argument(value: Any) -> Any:
    """A bound value: itself, a function's source, plain collections item by item, or else its type's name."""
    if _is_plain(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_argument(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _argument(item) for name, item in value.items()}
    if isinstance(value, (FunctionType, functools.partial, MethodType)):
        return _identity(value)
    return ["a", f"{type(value).__module__}.{type(value).__qualname__}"]
