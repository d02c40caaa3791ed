"""Any optimizer of torch.optim by name, or `module:Class`, with arguments checked against its signature."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from flowrun import config
from flowrun.config import ConfigError
from flowrun.spelling import suggest

# Settings with a field of their own; giving them again in `args` would leave two places for one number.
OWN_FIELDS = ("lr", "betas", "weight_decay")


def make_optimizer(settings: config.Optimizer, parameters: Mapping[str, Parameter]) -> Optimizer:
    """The configured optimizer over `parameters`, as one group in the mapping's order.

    Raises ConfigError for an unknown class, an argument that the class does not take, or one that it refuses."""
    if not parameters:
        raise ConfigError("task.trainable_models, adapter.lora_base_model", "nothing is trained",
                          "name a component in one of them")
    cls = _find(settings.name)
    arguments = _arguments(settings, cls)
    try:
        return cls(list(parameters.values()), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("optimizer", f"{cls.__name__} refuses these settings ({error})",
                          "see the class's own documentation") from error


def _find(name: str) -> type[Optimizer]:
    if ":" in name:
        return _import(name)
    known = {n.lower(): c for n, c in vars(torch.optim).items()
             if inspect.isclass(c) and issubclass(c, Optimizer) and c is not Optimizer}
    usable = sorted(c.__name__ for c in known.values() if not _needs_closure(c))
    cls = known.get(name.lower())
    if cls is None:
        raise ConfigError("optimizer.name", f"torch.optim has no {name}",
                          f"{suggest(name, usable)} (your own: module:Class)")
    if _needs_closure(cls):
        raise ConfigError("optimizer.name", f"{name} computes the loss several times a step, which training does once",
                          f"use one of {', '.join(usable)}")
    return cls


def _import(name: str) -> type[Optimizer]:
    module, _, attribute = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError("optimizer.name", f"cannot import {name} ({error})",
                          "give module:Class of an installed package") from error
    if not (inspect.isclass(cls) and issubclass(cls, Optimizer)):
        raise ConfigError("optimizer.name", f"{name} is no torch.optim.Optimizer", "give a class derived from it")
    return cls


def _needs_closure(cls: type[Optimizer]) -> bool:
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _arguments(settings: config.Optimizer, cls: type[Optimizer]) -> dict[str, Any]:
    """Keyword arguments for `cls`; every one of them is in its signature."""
    taken = inspect.signature(cls).parameters
    names = [name for name in list(taken)[1:] if taken[name].kind is not inspect.Parameter.VAR_KEYWORD]
    if "lr" not in names:
        raise ConfigError("optimizer.name", f"{cls.__name__} takes no lr, which the schedule sets", "use another class")
    arguments: dict[str, Any] = {"lr": settings.lr}
    if settings.betas is not None:
        if "betas" not in names:
            raise ConfigError("optimizer.betas", f"{cls.__name__} takes no betas", "set optimizer.betas=null")
        usual = taken["betas"].default
        if isinstance(usual, tuple) and len(usual) != len(settings.betas):
            raise ConfigError("optimizer.betas", f"{cls.__name__} takes {len(usual)}, not {len(settings.betas)}",
                              f"its own are {list(usual)}")
        arguments["betas"] = tuple(settings.betas)
    if "weight_decay" in names:
        arguments["weight_decay"] = settings.weight_decay
    elif settings.weight_decay:
        raise ConfigError("optimizer.weight_decay", f"{cls.__name__} takes none", "set optimizer.weight_decay=0")
    for name in settings.args:
        if name in OWN_FIELDS:
            raise ConfigError(f"optimizer.args.{name}", "has a field of its own", f"set optimizer.{name}")
        if name not in names:
            raise ConfigError(f"optimizer.args.{name}", f"{cls.__name__} takes no {name}",
                              suggest(name, set(names) - set(OWN_FIELDS)))
    return arguments | dict(settings.args)
