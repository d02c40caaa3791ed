"""Adapters with peft's layers; formulas in `layouts`. All is kept in fp32 on any base: an update of 1e-4 of a weight is
lost in bf16."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers.loaders import PeftAdapterMixin
from diffusers.training_utils import cast_training_params
from peft import PeftConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.nn import Module

from flowrun.adapters import saved
from flowrun.adapters.config import ALL_LINEAR, PATTERN, Config, Variant
from flowrun.adapters.files import Part
from flowrun.adapters.layouts import layout
from flowrun.adapters.targets import resolve
from flowrun.config import ConfigError
from flowrun.graph import seed_of
from flowrun.pipelines import AdapterNames

NAME = "default"  # of the adapter within the model; not part of saved keys


def check(outlines: Mapping[str, Module], config: Config, lora_targets: Mapping[str, Sequence[str]],
          names: AdapterNames | None) -> list[str]:
    """What `add` would refuse, on networks without weights; they have adapters then. Returns warnings."""
    parts = _insert(outlines, config, lora_targets, 0, names)
    if config.init_from is None:
        return []
    _fitted(outlines, parts, config)
    if all(part.recorded or part.scale is not None for part in parts.values()):
        return []
    return [f"{config.init_from} does not record its scale; adapter.alpha={config.alpha:g} and "
            f"adapter.variant={config.variant.value} are used"]


def add(models: Mapping[str, Module], config: Config, lora_targets: Mapping[str, Sequence[str]], seed: int,
        names: AdapterNames | None) -> None:
    """Put an adapter on each model; only the adapters train. Same seed, same start, on every device."""
    parts = _insert(models, config, lora_targets, seed, names)
    for model in models.values():
        cast_training_params(model, torch.float32)
        if config.variant is Variant.dora:
            _measure(model)
        model.train()
    if config.init_from is not None:
        for name, weights in _fitted(models, parts, config).items():
            set_peft_model_state_dict(models[name], weights, adapter_name=NAME)


def weights_of(model: Module) -> dict[str, Tensor]:
    """The adapter's weights under peft's names, `<layer>.lora_A.weight`."""
    return get_peft_model_state_dict(model, adapter_name=NAME)


def carriers(model: Module) -> dict[str, BaseTunerLayer]:
    """Layer -> what stands there with the adapter."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}


@contextmanager
def without(models: Mapping[str, Module]) -> Iterator[None]:
    """The networks compute without their adapters within the block; peft freezes these meanwhile, which is undone after it."""
    layers = [layer for model in models.values() for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    open_before = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    try:
        for layer in layers:
            layer.enable_adapters(enabled=False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
        for parameter in open_before:
            parameter.requires_grad_(True)


def told(outlines: Mapping[str, Module], config: Config) -> list[str]:
    """A line for each component: how many of its layers carry the adapter, and which. outlines: as `check` left them."""
    lines = []
    for name, model in outlines.items():
        targets = model.peft_config[NAME].target_modules
        which = PATTERN + targets if isinstance(targets, str) else ", ".join(sorted(targets))
        which = ALL_LINEAR if config.targets == ALL_LINEAR else which
        lines.append(f"{name}: {len(carriers(model))} layers, {which}")
    return lines


def _insert(models: Mapping[str, Module], config: Config, lora_targets: Mapping[str, Sequence[str]], seed: int,
            names: AdapterNames | None) -> dict[str, Part]:
    """Adapters that change nothing yet. Returns what `init_from` holds, which the ranks follow."""
    targets = resolve(models, config, lora_targets)
    parts = {} if config.init_from is None else saved.start(models, config, names)
    for name, model in models.items():
        other = saved.others(parts.get(name), config)
        made = layout(config.variant, config.rank, config.alpha, config.dropout, targets[name], other.ranks, other.alphas)
        with torch.random.fork_rng(devices=[]):  # peft draws from the global CPU generator
            torch.default_generator.manual_seed(seed_of(seed, "lora", name))
            _inject(model, made, name)
    return parts


def _inject(model: Module, made: PeftConfig, name: str) -> None:
    try:
        if isinstance(model, PeftAdapterMixin):
            model.add_adapter(made, adapter_name=NAME)
        else:  # text encoders, and the few diffusers networks without the mixin
            inject_adapter_in_model(made, model, NAME)
    except (ValueError, TypeError) as error:
        reason = textwrap.shorten(str(error), 120, placeholder=" ...")  # peft prints whole networks
        raise ConfigError("adapter.targets", f"{name}: {reason}", "name linear or convolution layers") from error


def _measure(model: Module) -> None:
    """DoRA's magnitudes again, from the weights in fp32: in bf16 they are off by up to 1/256, and so is the output."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and NAME in layer.lora_A:  # embeddings, which are looked up, have others
            layer.lora_magnitude_vector[NAME].update_layer(
                base_layer=layer.get_base_layer(), lora_A=layer.lora_A[NAME].weight, lora_B=layer.lora_B[NAME].weight,
                scaling=layer.scaling[NAME])


def _fitted(models: Mapping[str, Module], parts: Mapping[str, Part], config: Config) -> dict[str, dict[str, Tensor]]:
    own = {name: weights_of(model) for name, model in models.items()}
    return saved.fitted(parts, own, models, Path(config.init_from))
