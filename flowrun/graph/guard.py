"""A unit's declarations are checked while it runs: what it could reach without saying so raises UndeclaredEffect."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import numpy
import torch

from flowrun.graph.draws import Draws
from flowrun.graph.state import State, tensors
from flowrun.graph.unit import Unit


class UndeclaredEffect(Exception):
    """A unit did what it does not declare. The message names the unit, the effect and the missing declaration."""

    def __init__(self, unit: Unit, effect: str, declaration: str) -> None:
        super().__init__(f"unit {unit.name} {effect}; {declaration}")


class Context:
    """What `process` may use besides its inputs: declared models, any model's configuration, a keyed generator."""

    def __init__(self, unit: Unit, models: Mapping[str, Any], configs: Mapping[str, Any], draws: Draws) -> None:
        self._unit, self._draws = unit, draws
        self.models: Mapping[str, Any] = _DeclaredModels(unit, models)
        self.configs = configs
        self._generator: torch.Generator | None = None

    @property
    def generator(self) -> torch.Generator:
        if self._unit.random == "none":
            raise UndeclaredEffect(self._unit, "draws random numbers", "declare random='per_epoch' or random='frozen'")
        if self._generator is None:
            self._generator = self._draws.generator(self._unit)
        return self._generator


class _DeclaredModels(Mapping[str, Any]):
    """`models["text_encoder"]`, or a part of one by its attribute path. Holds the declared names only."""

    def __init__(self, unit: Unit, models: Mapping[str, Any]) -> None:
        self._unit, self._models = unit, models

    def __getitem__(self, name: str) -> Any:
        declared = self._unit.onload_model_names
        if not any(not d or name == d or name.startswith(f"{d}.") for d in declared):
            raise UndeclaredEffect(self._unit, f"calls the model {name!r}", f"add it to onload_model_names, which has {list(declared)}")
        top, _, path = name.partition(".")
        return reduce(getattr, path.split(".") if path else (), self._models[top])

    def __iter__(self) -> Iterator[str]:
        return iter(self._unit.onload_model_names)

    def __len__(self) -> int:
        return len(self._unit.onload_model_names)


class DeclaredScope(dict):
    """One scope as a take-over unit sees it: asking for a name that it did not declare raises."""

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

    def get(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return super().get(name, default)

    def _check(self, name: object) -> None:
        if name not in self._names:
            raise UndeclaredEffect(self._unit, f"reads {self._scope}.{name}", f"add {name!r} to input_params")


def versions(state: State, unit: Unit) -> list[tuple[str, str, torch.Tensor, int]]:
    """(scope, name, tensor, version) of every tensor that the unit can reach; a changed version is an in-place write."""
    scopes = {"shared": state.shared, "posi": state.posi, "nega": state.nega}
    names = [(s, n) for s, values in scopes.items() for n in values] if unit.is_barrier else unit.reads
    return [(s, n, t, t._version) for s, n in names if n in scopes[s] for t in tensors(scopes[s][n])]


def check_versions(unit: Unit, before: list[tuple[str, str, torch.Tensor, int]]) -> None:
    for scope, name, tensor, version in before:
        if tensor._version != version:
            raise UndeclaredEffect(unit, f"changes its input {scope}.{name} in place", "return a new tensor instead")


def check_returned(unit: Unit, returned: Any) -> Mapping[str, Any]:
    """The mapping of outputs; an empty one for a may-writer's None."""
    if returned is None and (unit.may_write or not unit.output_params):
        return {}
    if not isinstance(returned, Mapping):
        raise UndeclaredEffect(unit, f"returns {type(returned).__name__}", "return a mapping of output names to values")
    strange = [name for name in returned if name not in unit.output_params]
    if strange:
        raise UndeclaredEffect(unit, f"writes {strange[0]!r}", f"add it to output_params, which has {list(unit.output_params)}")
    missing = [name for name in unit.output_params if name not in returned]
    if missing and not unit.may_write:
        raise UndeclaredEffect(unit, f"does not return {missing[0]!r}", "return it always, or declare may_write=True")
    return returned


def global_generators() -> tuple[Any, ...]:
    """States of the generators that anybody can draw from: Python's, NumPy's and torch's, with every GPU in use."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy_state = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy_state["pos"], numpy_state["key"].tobytes(), *(s.numpy().tobytes() for s in (torch.get_rng_state(), *gpus))
