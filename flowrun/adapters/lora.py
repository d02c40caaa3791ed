"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): W + alpha / r B A, with peft's layers.

Kept in fp32 on any base: an update of 1e-4 of a weight is lost in bf16.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import PeftAdapterMixin
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE, LoraBaseMixin
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module

from flowrun.adapters import Config
from flowrun.config import ConfigError
from flowrun.graph import seed_of
from flowrun.spelling import suggest

NAME = "default"  # of the adapter within the model; not part of saved keys


def check(outlines: Mapping[str, Module], config: Config, lora_targets: Mapping[str, Sequence[str]]) -> list[str]:
    """What `add` would refuse, on networks without weights; they have adapters then. Returns warnings."""
    _insert(outlines, config, lora_targets, seed=0)
    if config.init_from is None:
        return []
    fitting = _fitting(outlines, Path(config.init_from), config)
    return [] if fitting.alpha_known else [
        f"{config.init_from} does not record its alpha; adapter.alpha={config.alpha:g} is used"
    ]


def add(models: Mapping[str, Module], config: Config, lora_targets: Mapping[str, Sequence[str]], seed: int) -> None:
    """Put an adapter on each model; only the adapters train. Same seed, same start, on every device."""
    _insert(models, config, lora_targets, seed)
    for model in models.values():
        cast_training_params(model, torch.float32)
        model.train()
    if config.init_from is not None:
        for name, weights in _fitting(models, Path(config.init_from), config).tensors.items():
            set_peft_model_state_dict(models[name], weights, adapter_name=NAME)


def _insert(models: Mapping[str, Module], config: Config, lora_targets: Mapping[str, Sequence[str]], seed: int) -> None:
    targets = _targets(models, config, lora_targets)
    for name, model in models.items():
        layout = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout,
                            target_modules=targets[name])
        with torch.random.fork_rng(devices=[]):  # peft draws A from the global CPU generator
            torch.default_generator.manual_seed(seed_of(seed, "lora", name))
            _inject(model, layout, name)


def save(directory: Path, models: Mapping[str, Module]) -> Path:
    """Write `pytorch_lora_weights.safetensors`: keys `<component>.<layer>.lora_A.weight`, and the layout (rank, alpha)
    as metadata, without which a loader takes alpha for r."""
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {}
    for name, model in models.items():
        tensors |= LoraBaseMixin.pack_weights(get_peft_model_state_dict(model, adapter_name=NAME), name)
        layout |= {f"{name}.{key}": value for key, value in model.peft_config[NAME].to_dict().items()}
    LoraBaseMixin.write_lora_layers(state_dict=tensors, save_directory=str(directory), is_main_process=True,
                                    weight_name=LORA_WEIGHT_NAME_SAFE, save_function=None, safe_serialization=True,
                                    lora_adapter_metadata=layout)
    return directory / LORA_WEIGHT_NAME_SAFE


def _inject(model: Module, layout: LoraConfig, name: str) -> None:
    try:
        if isinstance(model, PeftAdapterMixin):
            model.add_adapter(layout, adapter_name=NAME)
        else:  # text encoders, and the few diffusers networks without the mixin
            inject_adapter_in_model(layout, model, NAME)
    except ValueError as error:
        reason = textwrap.shorten(str(error), 120, placeholder=" ...")  # peft prints whole networks
        raise ConfigError("adapter.targets", f"{name}: {reason}", "name linear or convolution layers") from error


def _targets(models: Mapping[str, Module], config: Config, own: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Component -> the entries that match layers in it. Every entry must match in at least one component."""
    if config.targets == "auto":
        for name in models:
            if not own.get(name):
                raise ConfigError("adapter.targets", f"auto: the pipeline lists no layers for {name}", "give a list")
        wanted = {name: list(own[name]) for name in models}
    else:
        wanted = {name: list(config.targets) for name in models}
    layers = {name: [n for n, _ in model.named_modules() if n] for name, model in models.items()}
    found = {name: [e for e in wanted[name] if any(f".{n}".endswith(f".{e}") for n in layers[name])] for name in models}
    for name in models:
        matched = set(found[name]) if config.targets == "auto" else {e for entries in found.values() for e in entries}
        for entry in wanted[name]:
            if entry not in matched:
                raise ConfigError("adapter.targets", f"{entry} matches no layer of {', '.join(models)}",
                                  suggest(entry, _ends(models.values(), entry.count(".") + 1)))
        if not found[name]:
            raise ConfigError("adapter.targets", f"none of them is a layer of {name}",
                              f"take {name} out of adapter.lora_base_model")
    return found


def _ends(models: Iterable[Module], parts: int) -> set[str]:
    """The last `parts` parts of the names of all layers that hold weights themselves; a mere number takes one more."""
    names = [name.split(".") for model in models for name, layer in model.named_modules()
             if name and any(p.ndim > 1 for p in layer.parameters(recurse=False))]
    return {".".join(n[-parts - n[-1].isdigit():]) for n in names}


@dataclass(frozen=True)
class _Fitting:
    """tensors: component -> its adapter's weights under peft's names. alpha_known: the file says which alpha it has."""

    tensors: dict[str, dict[str, Tensor]]
    alpha_known: bool


def _fitting(models: Mapping[str, Module], path: Path, config: Config) -> _Fitting:
    """A saved adapter for these models: every key of the file is used and every weight of the adapter is in the file."""
    tensors, layout = _read(path / LORA_WEIGHT_NAME_SAFE if path.is_dir() else path)
    if len(models) == 1 and not any(key.startswith(f"{name}.") for key in tensors for name in models):
        tensors = {f"{name}.{key}": value for name in models for key, value in tensors.items()}
    own = {f"{name}.{key}": value for name, model in models.items()
           for key, value in get_peft_model_state_dict(model, adapter_name=NAME).items()}
    for what, keys in (("has no", own.keys() - tensors.keys()), ("also has", tensors.keys() - own.keys())):
        if keys:
            raise ConfigError("adapter.init_from", f"{path} {what} {min(keys)} ({len(keys)} such)",
                              "set adapter.lora_base_model and adapter.targets as they were when it was made")
    alphas = [f"{name}.lora_alpha" for name in models]
    for name in models:
        key = next(key for key in own if key.startswith(f"{name}.") and "lora_A" in key)
        _same("rank", tensors[key].shape[0], config.rank, path)
    for alpha in alphas:
        _same("alpha", layout.get(alpha, config.alpha), config.alpha, path)
    for key, value in own.items():
        if tensors[key].shape != value.shape:
            raise ConfigError("adapter.init_from", f"{path}: {key} is {list(tensors[key].shape)}, the layer's adapter "
                              f"{list(value.shape)}", "it was made for another network")
    parts = {name: {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
             for name in models}
    return _Fitting(parts, all(alpha in layout for alpha in alphas))


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
    return re.sub(r"\.(lora_[AB])\.\w+\.(weight|bias)$", r".\1.\2", key)


def _same(what: str, saved: float, configured: float, path: Path) -> None:
    if saved != configured:
        raise ConfigError(f"adapter.{what}", f"is {configured:g}, but {path} was made with {saved:g}",
                          f"set adapter.{what}={saved:g}")
