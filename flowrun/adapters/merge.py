"""Adapters that become part of the frozen base before training: W + scale (what the adapter adds to W), scale times.

The new adapter then learns only what they do not do, and is saved without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from peft import set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import CONFIG_NAME
from torch.nn import Module

from flowrun.adapters.config import Config, Preset, Variant
from flowrun.adapters.files import Part, layer_of, places, read
from flowrun.adapters.layouts import divisor, layout
from flowrun.adapters.lora import NAME, carriers, weights_of
from flowrun.cache.key import digest
from flowrun.config import ConfigError
from flowrun.files import HashFile
from flowrun.pipelines import AdapterNames, Change
from flowrun.spelling import suggest

Outline = Callable[[], Module]  # a component without its weights


def changes(outlines: Mapping[str, Outline], config: Config, names: AdapterNames | None) -> tuple[dict[str, Change], list[str]]:
    """What `merge_first` does to each component, in order; and warnings. outlines: of every component.

    Raises ConfigError for an adapter of another component or network."""
    todo: dict[str, list[Preset]] = {}
    warnings = []
    for preset in config.presets:
        for name, part in _parts(preset, outlines, config, names).items():
            if name not in outlines:
                raise _error(f"{preset.path} holds an adapter of {name}", suggest(name, outlines))
            _check(part, outlines[name](), preset, name)
            todo.setdefault(name, []).append(preset)
            if not part.recorded and part.scale is None:
                warnings.append(f"{preset.path} does not record its scale; alpha is taken for the rank, as diffusers does")
    return {name: _change(name, presets, outlines, config, names) for name, presets in todo.items()}, list(dict.fromkeys(warnings))


def merge(model: Module, part: Part, scale: float) -> None:
    """Put the adapter into the model's weights, for good. Added in fp32, layer by layer, and rounded once.

    Raises ValueError when the sum is not finite."""
    made = _layout(part)
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[made.peft_type](model, {NAME: made}, NAME)
    cast_training_params(model, torch.float32)
    set_peft_model_state_dict(model, part.tensors, adapter_name=NAME)
    for layer in carriers(model).values():
        layer.set_scale(NAME, scale)
        weight = layer.get_base_layer().weight
        dtype, weight.data = weight.dtype, weight.data.float()
        layer.merge(safe_merge=True)
        weight = layer.get_base_layer().weight
        weight.data = weight.data.to(dtype)
    tuner.unload()
    if hasattr(model, "peft_config"):
        del model.peft_config


def _change(name: str, presets: list[Preset], outlines: Mapping[str, Outline], config: Config, names: AdapterNames | None) -> Change:
    def apply(model: Module) -> None:
        for preset in presets:
            try:
                merge(model, _parts(preset, outlines, config, names)[name], preset.scale)
            except ValueError as error:
                raise _error(f"{preset.path} cannot be merged into {name} ({error})", "give one that is not damaged") from error

    described = ", ".join(f"{preset.path} merged {preset.scale:g} times" for preset in presets)
    return Change(apply=apply, identity=partial(_identity, presets), describe=described)


def _identity(presets: list[Preset], hash_file: HashFile) -> bytes:
    files = [[path for file in places(Path(preset.path), "").values() for path in (file, file.with_name(CONFIG_NAME)) if path.is_file()]
             for preset in presets]  # fmt: skip
    return digest([[preset.scale, *map(hash_file, paths)] for preset, paths in zip(presets, files, strict=True)])


def _parts(preset: Preset, outlines: Mapping[str, Outline], config: Config, names: AdapterNames | None) -> dict[str, Part]:
    alone = config.lora_base_model[0] if len(config.lora_base_model) == 1 else None
    unet: Any = dict(outlines["unet"]().config) if "unet" in outlines else None
    try:
        return read(Path(preset.path), list(outlines), alone, names.reader if names else None, unet)
    except ConfigError as error:
        raise ConfigError("adapter.merge_first", error.what, error.fix) from error


def _layout(part: Part) -> Any:
    """peft's settings for the layers that are in the file."""
    variant, layers = part.variants[-1], sorted({layer_of(key) for key in part.tensors})
    targets = "|".join(map(re.escape, layers))  # whole names: ends of names could be other layers' too
    if part.variants == [Variant.rslora, Variant.dora]:
        raise _error("an adapter is both rslora and dora", "give one that is one of them")
    kept = part.layout
    if part.recorded:
        return layout(variant, kept["r"], part.alpha, 0.0, targets, kept.get("rank_pattern") or {}, kept.get("alpha_pattern") or {})
    ranks = part.ranks
    if not ranks.keys() >= set(layers):
        raise _error(f"the adapter of {layers[0]} does not say its rank", "give it as flowrun or peft save it")
    scale = 1.0 if part.scale is None else part.scale
    alphas = {f"^{layer}": scale * divisor(variant, rank) for layer, rank in ranks.items()}
    first = ranks[layers[0]]
    return layout(variant, first, first, 0.0, targets, {f"^{layer}": rank for layer, rank in ranks.items()}, alphas)


def _check(part: Part, outline: Module, preset: Preset, name: str) -> None:
    """The file's layers are the network's, and as wide."""
    inner = dict(outline.named_modules())
    for layer in sorted({layer_of(key) for key in part.tensors}):
        if layer not in inner:
            raise _error(f"{preset.path} holds an adapter of {name}.{layer}, which is no layer", suggest(layer, filter(None, inner)))
    made = _layout(part)
    try:
        PEFT_TYPE_TO_TUNER_MAPPING[made.peft_type](outline, {NAME: made}, NAME)
    except (ValueError, TypeError) as error:
        raise _error(f"{preset.path} does not fit {name} ({str(error)[:120]})", "give one of this network") from error
    own = weights_of(outline)
    for key in sorted(own.keys() | part.tensors.keys()):
        shapes = [list(tensors[key].shape) if key in tensors else "missing" for tensors in (part.tensors, own)]
        if shapes[0] != shapes[1]:
            raise _error(f"{preset.path}: {name}.{key} is {shapes[0]}, the layer's adapter {shapes[1]}", "it was made for another network")


def _error(what: str, fix: str) -> ConfigError:
    return ConfigError("adapter.merge_first", what, fix)
