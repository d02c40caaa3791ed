"""The forms in which a slot of accelerators may be written, made one. No torch.

Options of a group, `{torch_compile: {mode: full}}`; a list of entries, `[{name: torch_compile, params: {mode: full}}]`; or
one such entry alone. What is not given is as in the option's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from flowrun.config import ConfigError

ENTRY = ("name", "params")


def normalised(slot: str, value: Any, conf: Path) -> dict[str, dict[str, Any]] | None:
    """Name -> settings, in the order of application; None: no accelerators. conf: the folder of options.

    Raises ConfigError for other forms, two forms at once, and a name that stands twice."""
    key = f"acceleration.{slot}"
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        value = [value]
    if value is None or value == {} or value == []:
        return None
    if isinstance(value, Mapping):
        chosen = [(str(name), settings) for name, settings in value.items()]
    elif isinstance(value, list):
        chosen = [_entry(key, slot, entry, value) for entry in value]
    else:
        raise _no_options(key, slot, value)
    names = [name for name, _ in chosen]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(key, f"{', '.join(twice)} is chosen twice", "name each accelerator once")
    return {name: {**_of_file(conf, slot, name), **_settings(f"{key}.{name}", settings)} for name, settings in chosen}


def _entry(key: str, slot: str, entry: Any, whole: Any) -> tuple[str, Any]:
    if not isinstance(entry, Mapping):
        raise _no_options(key, slot, whole)
    if others := [name for name in entry if name not in ENTRY]:
        what = f"has {', '.join(map(str, others))} beside name and params"
        raise ConfigError(key, what, f"settings stand in params; or choose by 'acceleration/{slot}=[NAME,...]', not both")
    if not isinstance(entry.get("name"), str) or not entry["name"]:
        raise ConfigError(key, f"an entry has the name {entry.get('name')!r}", "name an accelerator, or pkg.module:Class")
    return entry["name"], entry.get("params")


def _settings(key: str, settings: Any) -> Mapping[str, Any]:
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(key, f"is {settings!r}", "give a mapping of its settings, {NAME: VALUE}")
    return settings


def _of_file(conf: Path, slot: str, name: str) -> dict[str, Any]:
    """The values of the option's file, none for a class of the user's own."""
    file = conf / "acceleration" / slot / f"{name}.yaml"
    if not name.isidentifier() or not file.is_file():
        return {}
    return OmegaConf.to_container(OmegaConf.load(file))[name]


def _no_options(key: str, slot: str, value: Any) -> ConfigError:
    fix = f"choose options with 'acceleration/{slot}=[NAME,...]', or give entries, [{{name: NAME, params: {{...}}}}]"
    return ConfigError(key, f"is {value!r}, not a mapping of options", fix)
