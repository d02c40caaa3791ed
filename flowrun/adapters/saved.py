"""A saved adapter to start from: read under plain names, and compared with the adapter that is to hold it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowrun.adapters.config import Config, Variant
from flowrun.config import ConfigError

LOADED_AS = {"transformer_2": "transformer"}  # components whose adapter diffusers loads, when it is told to, as if it were another's
MAGNITUDE = ".lora_magnitude_vector"  # end of the names of DoRA's magnitudes


@dataclass(frozen=True)
class Fitting:
    """tensors: component -> its adapter's weights under peft's names. scale_known: the file says how B A is scaled."""

    tensors: dict[str, dict[str, Tensor]]
    scale_known: bool


def fitting(own: Mapping[str, Mapping[str, Tensor]], path: Path, config: Config) -> Fitting:
    """The adapter in `path`, a file or its directory. own: component -> the weights that must be in it, and no others.

    Raises ConfigError for one of another variant, rank, alpha, of other layers or of another network."""
    tensors, layout = _gather(own, path)
    if len(own) == 1 and not any(key.startswith(f"{name}.") for key in tensors for name in own):
        tensors = {f"{name}.{key}": value for name in own for key, value in tensors.items()}
    known = all(f"{name}.lora_alpha" in layout for name in own)
    for name in own:
        _check_variant(name, tensors, layout, config, path)
    wanted = {f"{name}.{key}": value for name, weights in own.items() for key, value in weights.items()}
    for what, keys in (("has no", wanted.keys() - tensors.keys()), ("also has", tensors.keys() - wanted.keys())):
        if keys:
            raise ConfigError("adapter.init_from", f"{path} {what} {min(keys)} ({len(keys)} such)",
                              "set adapter.lora_base_model and adapter.targets as they were when it was made")
    for name in own:
        key = next(key for key in wanted if key.startswith(f"{name}.") and re.search(r"\.lora_(embedding_)?A", key))
        _check_same("rank", tensors[key].shape[0], config.rank, path)
        _check_same("alpha", layout.get(f"{name}.lora_alpha", config.alpha), config.alpha, path)
    for key, value in wanted.items():
        if tensors[key].shape != value.shape:
            raise ConfigError("adapter.init_from", f"{path}: {key} is {list(tensors[key].shape)}, the layer's adapter "
                              f"{list(value.shape)}", "it was made for another network")
    return Fitting({name: {key: tensors[f"{name}.{key}"] for key in weights} for name, weights in own.items()}, known)


def _gather(own: Mapping[str, Any], path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of the components' file, and of the files of those that have their own in a folder of their name."""
    tensors, layout = {}, {}
    apart = {name for name in own if name in LOADED_AS and (path / name / LORA_WEIGHT_NAME_SAFE).is_file()}
    if own.keys() - apart:
        tensors, layout = _read(path / LORA_WEIGHT_NAME_SAFE if path.is_dir() else path)
        if len(own) == 1 and (name := next(iter(own))) in LOADED_AS:
            tensors, layout = (_renamed(named, LOADED_AS[name], name) for named in (tensors, layout))
    for name in sorted(apart):
        for gathered, named in zip((tensors, layout), _read(path / name / LORA_WEIGHT_NAME_SAFE), strict=True):
            gathered |= _renamed(named, LOADED_AS[name], name)
    return tensors, layout


def _renamed(named: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    return {f"{new}{key.removeprefix(old)}" if key.startswith(f"{old}.") else key: value for key, value in named.items()}


def _check_variant(name: str, tensors: Mapping[str, Tensor], layout: Mapping[str, Any], config: Config, path: Path) -> None:
    """DoRA shows in the file's weights; rsLoRA only in its recorded layout, without which the setting is believed."""
    recorded = f"{name}.lora_alpha" in layout
    rslora = layout.get(f"{name}.use_rslora", False) if recorded else config.variant is Variant.rslora
    dora = any(key.startswith(f"{name}.") and key.endswith(MAGNITUDE) for key in tensors)
    saved = [v.value for v, used in ((Variant.rslora, rslora), (Variant.dora, dora)) if used] or [Variant.lora.value]
    if saved != [config.variant.value]:
        fix = f"set adapter.variant={saved[0]}" if len(saved) == 1 else "an adapter has one of them here: give another"
        raise ConfigError("adapter.variant", f"is {config.variant.value}, but {path} was made with {' and '.join(saved)}",
                          fix)


def _check_same(what: str, saved: float, configured: float, path: Path) -> None:
    if saved != configured:
        raise ConfigError(f"adapter.{what}", f"is {configured:g}, but {path} was made with {saved:g}",
                          f"set adapter.{what}={saved:g}")


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights under plain names (without wrapper prefixes and adapter names), and the recorded layout, {} if none."""
    if not file.is_file():
        raise ConfigError("adapter.init_from", f"there is no file {file}",
                          f"give a directory with {LORA_WEIGHT_NAME_SAFE}")
    try:
        with safe_open(file, "pt") as handle:
            layout = json.loads((handle.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
            return {_plain(key): handle.get_tensor(key) for key in handle.keys()}, layout  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ConfigError("adapter.init_from", f"{file} is no safetensors file ({error})", "give an adapter saved by "
                          "flowrun, diffusers or peft") from error


def _plain(key: str) -> str:
    key = re.sub(r"(^|\.)(base_model\.model|module)\.", r"\1", key)
    key = re.sub(rf"{re.escape(MAGNITUDE)}(\.\w+)?\.weight$", MAGNITUDE, key)
    return re.sub(r"\.(lora_[AB])\.\w+\.(weight|bias)$", r".\1.\2", key)
