"""Plug-ins by name: a name is a module of the kind's folder, `pkg.module:Class` is taken as it is. No torch.

Names come from file names, so listing them imports nothing. A plug-in's settings are checked against its nested
`Config` before anything is built: a dataclass with `kw_only` and `slots`, without defaults; numbers stand in conf/.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowrun.config import ConfigError
from flowrun.wording import check_fields, field_names, from_omegaconf, suggest, unknown


class WrongKind(ConfigError, TypeError):
    """A class that is named as a plug-in and is none of its kind."""


@dataclass(frozen=True)
class Registry:
    """One kind of plug-in. kind: the noun for messages; package: its folder; base_name: its base class."""

    kind: str
    package: str
    base_name: str

    def names(self) -> list[str]:
        """Modules of the package, those starting with `_` left out, in alphabetical order."""
        folders = find_spec(self.package).submodule_search_locations
        stems = (file.stem for folder in folders for file in Path(folder).glob("*.py"))
        return sorted(stem for stem in stems if not stem.startswith("_"))

    def base(self) -> type:
        return getattr(import_module(self.package), self.base_name)

    def find(self, name: str, key: str) -> type:
        """The plug-in's class. key: the setting that names it, for messages.

        Raises ConfigError when there is no such module or class, WrongKind when the class is not of this kind."""
        return self._outside(name, key) if ":" in name else self._inside(name, key)

    def build(self, key: str, cls: type, node: Any, beside: type | None = None) -> Any:
        """`node` as an instance of `cls.Config`. key: the section's name, for messages.

        beside: a dataclass whose fields stand in the same section (see `common`); they are left out here.
        Raises ConfigError for unknown keys, wrong types, missing values, and by the Config's own rules."""
        return checked(key, cls.Config, node, field_names(beside) if beside is not None else ())

    def _inside(self, name: str, key: str) -> type:
        if name not in self.names():
            more = "; a class of your own is written pkg.module:Class" if "." in name else ""
            raise ConfigError(key, f"there is no {self.kind} {name!r}", suggest(name, self.names()) + more)
        module, base = import_module(f"{self.package}.{name}"), self.base()
        found = [c for c in _classes(module, base).values() if c.__module__ == module.__name__]
        if len(found) != 1:
            raise TypeError(f"{module.__name__} defines {len(found)} subclasses of {self.base_name}, not one")
        return found[0]

    def _outside(self, name: str, key: str) -> type:
        module_name, _, class_name = name.partition(":")
        if not module_name or module_name.startswith(".") or not class_name:
            raise ConfigError(key, f"{name!r} names no class", "write pkg.module:Class")
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and f"{module_name}.".startswith(f"{error.name}."):
                fix = "install it, or run `python -m flowrun` in the folder that holds it"
                raise ConfigError(key, f"there is no module {error.name!r}", fix) from error
            what = f"{module_name} needs the package {error.name!r}"
            raise ConfigError(key, what, f"install {error.name}") from error
        found, base = getattr(module, class_name, None), self.base()
        if found is None:
            names = _classes(module, base)
            fix = suggest(class_name, names) if names else f"derive one from {self.package}.{self.base_name}"
            raise ConfigError(key, f"{module_name} has no {class_name!r}", fix)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise WrongKind(key, f"{name} is no {self.kind}", f"derive it from {self.package}.{self.base_name}")
        return found


def _classes(module: ModuleType, base: type) -> dict[str, type]:
    """Subclasses of `base` by their name in the module."""
    return {n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base) and c is not base}


def checked(key: str, schema: type, node: Any, others: Collection[str] = ()) -> Any:
    """`node` as an instance of the dataclass `schema`. others: further keys that may stand beside; they are left out.

    Raises ConfigError for unknown keys, wrong types, missing values, and by the schema's own rules."""
    if not isinstance(node, Mapping):
        raise ConfigError(key, f"is {node!r}", "give a mapping of its fields, {name: value}")
    names = [*field_names(schema), *others]
    for name in node:
        if name not in names:
            raise unknown(f"{key}.{name}", names)
    own = {name: value for name, value in node.items() if name in field_names(schema)}
    at = ""  # some of omegaconf's errors do not say which field they are about
    try:
        merged = OmegaConf.structured(schema)
        for at in own:
            merged = OmegaConf.merge(merged, {at: own[at]})
        at = ""
        check_fields(merged, key)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise from_omegaconf(error, key, at) from error


def common(key: str, schema: type, node: Any) -> Any:
    """The fields of `schema` out of a section that holds more, e.g. those that every task has. Raises ConfigError."""
    if not isinstance(node, Mapping):
        raise ConfigError(key, f"is {node!r}", "give a mapping of its fields, {name: value}")
    return checked(key, schema, {name: node[name] for name in field_names(schema) if name in node})


PIPELINES = Registry("pipeline", "flowrun.pipelines", "Pipeline")
SOURCES = Registry("data source", "flowrun.data", "Source")
ALGORITHMS = Registry("algorithm", "flowrun.algorithms", "Algorithm")
ACCELERATORS = Registry("accelerator", "flowrun.accelerators", "Accelerator")
SPLITTERS = Registry("splitter", "flowrun.splitters", "Splitter")
REWARDS = Registry("reward", "flowrun.rewards", "Reward")
