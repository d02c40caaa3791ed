"""A unit: one preprocessing computation that says what it reads, what it writes, which models it calls, what it draws.

The names are those of DiffSynth-Studio's pipeline units. A parameter is a (scope, name) pair: `prompt_embeds` of the
positive side and `prompt_embeds` of the negative side are two parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

SCOPES = ("shared", "posi", "nega")
RANDOM = ("none", "frozen", "per_epoch")

Param = tuple[str, str]  # (scope, name)
EVERYTHING: Param = ("*", "*")  # whatever a barrier reads or writes


def param_name(param: Param) -> str:
    """For messages: the name, with its scope in front unless that is the shared one."""
    scope, name = param
    return name if scope == "shared" else f"{scope}.{name}"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Declared effects of `process(ctx, **inputs) -> Mapping of outputs`.

    input_params: names read from the shared scope. input_params_posi, input_params_nega: argument name -> name in that
    side's scope. output_params: names written; shared, or both sides when `separate_cfg`, where `process` runs once per
    side. onload_model_names: models that the computation calls. take_over: `process(ctx, shared, posi, nega)` gets the
    declared inputs of all three scopes and returns the three mappings; an input that it leaves out is deleted. With
    nothing declared it is a barrier: it reads and writes everything. may_write: `process` may return only some outputs,
    or None. random: none, frozen (one draw for ever) or per_epoch (a fresh one each time). version, settings: what the
    code is and how it is set, part of a cached value's key. process_rows: `process_rows(ctx, rows)` does for several rows
    at once, each the mapping that `process` gets as keywords, what `process` does for one, but for the last bits.

    Raises TypeError for a bare string where names are wanted, ValueError for an unknown `random` or flags that exclude
    each other.
    """

    name: str
    input_params: tuple[str, ...] = ()
    input_params_posi: Mapping[str, str] = field(default_factory=dict)
    input_params_nega: Mapping[str, str] = field(default_factory=dict)
    output_params: tuple[str, ...] = ()
    onload_model_names: tuple[str, ...] = ()
    separate_cfg: bool = False
    take_over: bool = False
    may_write: bool = False
    random: str = "none"
    process: Callable[..., Any] | None = None
    process_rows: Callable[..., Any] | None = None
    version: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("input_params", "output_params", "onload_model_names"):
            object.__setattr__(self, name, _names(self.name, name, getattr(self, name)))
        for name in ("input_params_posi", "input_params_nega"):
            _check_side(self.name, name, getattr(self, name))
        if self.random not in RANDOM:
            raise ValueError(f"unit {self.name}: random is {self.random!r}; one of {', '.join(RANDOM)}")
        if self.take_over and self.separate_cfg:
            raise ValueError(f"unit {self.name}: take_over sees all scopes at once, separate_cfg one side; choose one")
        if self.process_rows is not None and (self.take_over or self.separate_cfg or self.random != "none"):
            raise ValueError(f"unit {self.name}: process_rows is for units that see one scope and draw nothing")

    @cached_property
    def is_barrier(self) -> bool:
        """Takes over and declares nothing: may read and write everything."""
        declared = (self.input_params, self.input_params_posi, self.input_params_nega, self.output_params)
        return self.take_over and not any(declared)

    @cached_property
    def reads(self) -> frozenset[Param]:
        sides = {"posi": self.input_params_posi, "nega": self.input_params_nega}
        if self.take_over:
            names = {*self.input_params, *self.input_params_posi.values(), *self.input_params_nega.values()}
            return frozenset((scope, name) for scope in SCOPES for name in names)
        own = {("shared", name) for name in self.input_params}
        return frozenset(own | {(scope, name) for scope, names in sides.items() for name in names.values()})

    @cached_property
    def writes(self) -> frozenset[Param]:
        """Everything that the unit may write or delete."""
        scopes = SCOPES if self.take_over else ("posi", "nega") if self.separate_cfg else ("shared",)
        return frozenset((scope, name) for scope in scopes for name in self.output_params)

    @cached_property
    def certain_writes(self) -> frozenset[Param]:
        return frozenset() if self.take_over or self.may_write else self.writes


def _names(unit: str, field_name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(f"unit {unit}: {field_name} is the text {value!r}; give a tuple, with its comma: ({value!r},)")
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"unit {unit}: {field_name} is {value!r}; give a tuple of names, () for none")
    wrong = [item for item in value if not isinstance(item, str)]
    if wrong:
        raise TypeError(f"unit {unit}: {field_name} holds {wrong[0]!r}; names are strings")
    return tuple(value)


def _check_side(unit: str, field_name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(item, str) for pair in value.items() for item in pair):
        fix = "map argument names to names of that scope, e.g. {'prompt': 'prompt'}"
        raise TypeError(f"unit {unit}: {field_name} is {value!r}; {fix}")
