"""A saved adapter to start from, compared with the adapter that is to hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.nn import Module

from flowrun.adapters.config import PRODUCTS, Config, Variant
from flowrun.adapters.files import Part, layer_of, read
from flowrun.adapters.layouts import divisor
from flowrun.config import ConfigError
from flowrun.pipelines import AdapterNames
from flowrun.spelling import suggest

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Others:
    """Layers of one component with another rank and alpha than the settings': pattern of names -> number."""

    ranks: dict[str, int]
    alphas: dict[str, float]


def start(models: Mapping[str, Module], config: Config, names: AdapterNames | None) -> dict[str, Part]:
    """What `init_from` holds, in agreement with the settings; its layers are compared later, by `fitted`.

    Raises ConfigError for one of another variant, rank or alpha."""
    path, own = Path(config.init_from), list(models)
    unet = dict(models["unet"].config) if "unet" in models else None
    parts = read(path, own, own[0] if len(own) == 1 else None, names.reader if names else None, unet)
    for name in parts.keys() & models.keys():
        _check_variant(parts[name], config, path)
        _check_numbers(parts[name], config, path)
    return parts


def others(part: Part | None, config: Config) -> Others:
    """Where an adapter that is the same in most layers differs."""
    if part is None:
        return Others({}, {})
    if part.recorded:
        return Others(dict(part.layout.get("rank_pattern") or {}), dict(part.layout.get("alpha_pattern") or {}))
    ranks = {f"^{layer}": rank for layer, rank in part.ranks.items() if rank != config.rank}
    scale = config.alpha / divisor(config.variant, config.rank)
    return Others(ranks, {layer: scale * divisor(config.variant, rank) for layer, rank in ranks.items()})


def fitted(parts: Mapping[str, Part], own: Mapping[str, Weights], models: Mapping[str, Module], path: Path) -> dict[str, Weights]:
    """Component -> its weights. own: the weights that must be in the file, and no others.

    Raises ConfigError for other layers, or of another network."""
    tensors = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.tensors.items()}
    wanted = {f"{name}.{key}": value for name, weights in own.items() for key, value in weights.items()}
    lacking, more = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
    if foreign := {key for key in more if not _is_layer(models, layer_of(key))}:
        key = min(foreign)
        layers = [f"{name}.{layer}" for name, model in models.items() for layer, _ in model.named_modules() if layer]
        raise ConfigError("adapter.init_from", f"{path} holds an adapter of {layer_of(key)} ({len(foreign)} such weights), and "
                          f"{', '.join(models)} has no such layer", suggest(layer_of(key), layers))
    for what, keys in (("has no", lacking), ("also has", more)):
        if keys:
            near = suggest(min(keys), more) if what == "has no" and more else ""
            raise ConfigError("adapter.init_from", f"{path} {what} {min(keys)} ({len(keys)} such)", "set adapter.lora_base_model "
                              f"and adapter.targets as they were when it was made{near and '; ' + near}")
    for key, value in wanted.items():
        if tensors[key].shape != value.shape:
            raise ConfigError("adapter.init_from", f"{path}: {key} is {list(tensors[key].shape)}, the layer's adapter "
                              f"{list(value.shape)}", "it was made for another network")
    return {name: {key: tensors[f"{name}.{key}"] for key in weights} for name, weights in own.items()}


def _is_layer(models: Mapping[str, Module], name: str) -> bool:
    component, _, layer = name.partition(".")
    if component not in models:  # another component, which may exist: said as a difference of lora_base_model
        return True
    inner = dict(models[component].named_modules())
    return layer in inner


def _check_variant(part: Part, config: Config, path: Path) -> None:
    """DoRA, LoKr and LoHa show in the file's weights; rsLoRA only in its layout, without which the setting is believed."""
    saved = part.variants
    if not part.recorded and part.scale is None and config.variant is Variant.rslora and saved[0] not in PRODUCTS:
        saved = [Variant.rslora, *(v for v in saved if v is not Variant.lora)]
    if saved != [config.variant]:
        said = [variant.value for variant in saved]
        fix = f"set adapter.variant={said[0]}" if len(said) == 1 else "an adapter has one of them here: give another"
        raise ConfigError("adapter.variant", f"is {config.variant.value}, but {path} was made with {' and '.join(said)}", fix)


def _check_numbers(part: Part, config: Config, path: Path) -> None:
    counts = Counter(part.ranks.values())
    rank = part.layout["r"] if part.recorded else counts.most_common(1)[0][0] if counts else config.rank
    most = " in most layers" if len(counts) > 1 else ""
    if rank != config.rank:
        raise _other("rank", rank, config.rank, f"{path} was made with {rank:g}{most}")
    alpha = part.alpha
    if alpha is None:
        alpha = config.alpha if part.scale is None else part.scale * divisor(config.variant, rank)
    if abs(alpha - config.alpha) > 1e-5 * abs(alpha):
        raise _other("alpha", alpha, config.alpha, f"{path} was made with {alpha:g}{most}")


def _other(what: str, saved: float, configured: float, said: str) -> ConfigError:
    return ConfigError(f"adapter.{what}", f"is {configured:g}, but {said}", f"set adapter.{what}={saved:g}")
