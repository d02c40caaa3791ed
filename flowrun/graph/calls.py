"""Calling a unit's process in its form (plain, once per CFG side, with all scopes); what it returned, as a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrun.graph.guard import Context, DeclaredScope, UndeclaredEffect, check_returned
from flowrun.graph.state import Record, State
from flowrun.graph.unit import SCOPES, Param, Unit

Call = Callable[[Unit, Context, State], Record]


def call_of(unit: Unit) -> Call:
    return _take_over if unit.take_over else _both_sides if unit.separate_cfg else _plain


def _plain(unit: Unit, context: Context, state: State) -> Record:
    inputs = _shared(unit, state)
    if unit.input_params_posi or unit.input_params_nega:
        inputs |= _side(unit.input_params_posi, state.posi) | _side(unit.input_params_nega, state.nega)
    returned = check_returned(unit, unit.process(context, **inputs))
    return Record({("shared", name): value for name, value in returned.items()})


def call_rows(unit: Unit, context: Context, states: Sequence[State]) -> list[Record]:
    """`process_rows` on several rows. Raises UndeclaredEffect when it does not return one mapping for each."""
    rows = [_shared(unit, s) | _side(unit.input_params_posi, s.posi) | _side(unit.input_params_nega, s.nega) for s in states]
    returned = list(unit.process_rows(context, rows))
    if len(returned) != len(rows):
        raise UndeclaredEffect(unit, f"returns {len(returned)} results for {len(rows)} rows", "return one for each row")
    return [
        Record({("shared", name): value for name, value in check_returned(unit, one).items()}) for one in returned
    ]


def _both_sides(unit: Unit, context: Context, state: State) -> Record:
    values: dict[Param, Any] = {}
    shared = _shared(unit, state)
    sides = (("posi", unit.input_params_posi, state.posi), ("nega", unit.input_params_nega, state.nega))
    for scope, names, side in sides:
        returned = check_returned(unit, unit.process(context, **shared, **_side(names, side)))
        values |= {(scope, name): value for name, value in returned.items()}
    return Record(values)


def _take_over(unit: Unit, context: Context, state: State) -> Record:
    """What is returned counts as written, what was seen and is missing as deleted. Both must be declared outputs; but
    an input may be handed back as it came."""
    given = {scope: getattr(state, scope) for scope in SCOPES}
    seen = {s: dict(given[s]) if unit.is_barrier else DeclaredScope(unit, s, given[s]) for s in SCOPES}
    before = {scope: dict(values) for scope, values in seen.items()}
    returned = unit.process(context, **seen)
    if not _three_mappings(returned):
        raise UndeclaredEffect(unit, "does not return three mappings", "a take_over unit returns (shared, posi, nega)")
    values: dict[Param, Any] = {}
    deleted: set[Param] = set()
    for scope, after in zip(SCOPES, returned, strict=True):
        values |= {(scope, n): v for n, v in after.items() if _is_write(unit, scope, n, v, before[scope])}
        gone = set(before[scope]).difference(after)
        undeclared = sorted(gone.difference(unit.output_params)) if not unit.is_barrier else []
        if undeclared:
            fix = f"return it, or add {undeclared[0]!r} to output_params"
            raise UndeclaredEffect(unit, f"removes {scope}.{undeclared[0]}", fix)
        deleted |= {(scope, name) for name in gone}
    return Record(values, frozenset(deleted))


def _three_mappings(returned: Any) -> bool:
    pack = isinstance(returned, (tuple, list)) and len(returned) == len(SCOPES)
    return pack and all(isinstance(item, Mapping) for item in returned)


def _is_write(unit: Unit, scope: str, name: str, value: Any, before: Mapping[str, Any]) -> bool:
    if unit.is_barrier or name in unit.output_params:
        return True
    if name in before and before[name] is value:
        return False
    fix = f"add {name!r} to output_params, which has {list(unit.output_params)}"
    raise UndeclaredEffect(unit, f"writes {scope}.{name}", fix)


def _shared(unit: Unit, state: State) -> dict[str, Any]:
    return {name: state.shared[name] for name in unit.input_params if name in state.shared}


def _side(names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {argument: values[name] for argument, name in names.items() if name in values}
