"""A unit's declarations are checked while it runs: what it could reach without saying so raises UndeclaredEffect.

Not seen: models and values that a process reaches through a closure or `self` instead of through `ctx` and its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from inspect import Parameter, signature
from typing import Any

import torch

from flowrun.graph.draws import Draws
from flowrun.graph.unit import Unit


class UndeclaredEffect(Exception):
    """A unit did what it does not declare. The message names the unit, the effect and the missing declaration."""

    def __init__(self, unit: Unit, effect: str, declaration: str) -> None:
        super().__init__(f"unit {unit.name} {effect}; {declaration}")


class Context:
    """What `process` may use besides its inputs: declared models, any model's configuration, a keyed generator."""

    __slots__ = ("_draws", "_generator", "_unit", "configs", "models")

    def __init__(self, unit: Unit, models: DeclaredModels, configs: Mapping[str, Any], draws: Draws) -> None:
        self._unit, self._draws = unit, draws
        self.models, self.configs = models, configs
        self._generator: torch.Generator | None = None

    @property
    def generator(self) -> torch.Generator:
        if self._unit.random == "none":
            raise UndeclaredEffect(self._unit, "draws random numbers", "declare random='per_epoch' or random='frozen'")
        if self._generator is None:
            self._generator = self._draws.generator(self._unit)
        return self._generator


class DeclaredModels(Mapping[str, Any]):
    """`models["text_encoder"]`, or a part of one by its attribute path. Holds the declared names only."""

    def __init__(self, unit: Unit, models: Mapping[str, Any]) -> None:
        self._unit, self._models = unit, models

    def __getitem__(self, name: str) -> Any:
        declared = self._unit.onload_model_names
        if not any(not d or name == d or name.startswith(f"{d}.") for d in declared):
            fix = f"add it to onload_model_names, which has {list(declared)}"
            raise UndeclaredEffect(self._unit, f"calls the model {name!r}", fix)
        top, _, path = name.partition(".")
        return reduce(getattr, path.split(".") if path else (), self._models[top])

    def __iter__(self) -> Iterator[str]:
        return iter(self._unit.onload_model_names)

    def __len__(self) -> int:
        return len(self._unit.onload_model_names)


class DeclaredScope(dict):
    """One scope as a take-over unit sees it: the values that it declared to read, and what it writes itself.

    Asking for any other name raises UndeclaredEffect."""

    def __init__(self, unit: Unit, scope: str, values: Mapping[str, Any]) -> None:
        self._unit, self._scope = unit, scope
        self._names = {name for at, name in unit.reads if at == scope}
        super().__init__({name: values[name] for name in self._names if name in values})

    def __missing__(self, name: str) -> Any:
        self._check(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        self._check(name)
        return super().__contains__(name)

    def __delitem__(self, name: str) -> None:
        self._check(name)
        super().__delitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._check(name)
        return super().pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return super().setdefault(name, default)

    def _check(self, name: object) -> None:
        if name not in self._names and not super().__contains__(name):
            raise UndeclaredEffect(self._unit, f"reads {self._scope}.{name}", f"add {name!r} to input_params")


def check_arguments(unit: Unit) -> None:
    """Compare the arguments of `process` with the declared inputs, before anything runs.

    Raises UndeclaredEffect for an argument that nothing declared fills, ValueError for an input that the process does
    not take and for two inputs under one argument name."""
    if unit.process is None or unit.take_over:
        return
    _, *rest = signature(unit.process).parameters.values()  # the first is ctx
    takes = {p.name: p for p in rest if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    anything = any(p.kind is Parameter.VAR_KEYWORD for p in rest)
    posi, nega = list(unit.input_params_posi), list(unit.input_params_nega)
    for side in (posi, nega) if unit.separate_cfg else ([*posi, *nega],):
        given = [*unit.input_params, *side]
        if len(set(given)) < len(given):
            twice = next(name for name in given if given.count(name) > 1)
            raise ValueError(f"unit {unit.name}: two inputs are passed as the argument {twice!r}; rename one")
        for name, parameter in takes.items():
            if name not in given and parameter.default is Parameter.empty:
                raise UndeclaredEffect(unit, f"takes the argument {name!r}", f"add {name!r} to input_params")
        strange = [name for name in given if name not in takes]
        if strange and not anything:
            what = f"unit {unit.name}: its process takes no argument {strange[0]!r}"
            raise ValueError(f"{what}; declare only what it reads")


def check_returned(unit: Unit, returned: Any) -> Mapping[str, Any]:
    """The mapping of outputs; an empty one for a may-writer's None."""
    if returned is None and (unit.may_write or not unit.output_params):
        return {}
    if not isinstance(returned, Mapping):
        raise UndeclaredEffect(unit, f"returns {type(returned).__name__}", "return a mapping of output names to values")
    strange = [name for name in returned if name not in unit.output_params]
    if strange:
        fix = f"add it to output_params, which has {list(unit.output_params)}"
        raise UndeclaredEffect(unit, f"writes {strange[0]!r}", fix)
    missing = [name for name in unit.output_params if name not in returned]
    if missing and not unit.may_write:
        raise UndeclaredEffect(unit, f"does not return {missing[0]!r}", "return it always, or declare may_write=True")
    return returned
